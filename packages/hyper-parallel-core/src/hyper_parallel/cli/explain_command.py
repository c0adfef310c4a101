"""``hyper-parallel explain``: run a program once on a mesh that is only pretended, and show operator by operator the
layouts, the redistributions that were inserted, and what was communicated."""

from __future__ import annotations

import argparse
import inspect
import runpy
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.cli.reporting import print_json, print_table
from hyper_parallel.plugins import Command

if TYPE_CHECKING:
    from hyper_parallel.analysis.op_trace import OpStep, OpTrace

DESCRIPTION = (
    "Run a script, or package:function, once as rank 0 of a mesh that is only pretended: collectives return at once, "
    "values are not right, layouts and communication are. A script runs as it is, also one for torchrun; a function "
    "with a parameter gets the mesh."
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axes and their sizes (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="show equal steps one by one, as they ran")
    parser.add_argument("--summary", action="store_true", help="show the totals only: communication and memory")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as HTML")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("program", help="a script, or package:function")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def _run(arguments: argparse.Namespace) -> int:
    from hyper_parallel.analysis.fake_world import fake_world, parse_mesh
    from hyper_parallel.analysis.op_trace import OpTrace, folded
    from hyper_parallel.analysis.sample_models import ModelNotUsable
    from hyper_parallel.analysis.user_traceback import user_traceback

    try:
        mesh = parse_mesh(arguments.mesh)
    except ValueError as error:
        print(f"hyper-parallel: --mesh: {error}", file=sys.stderr)
        return 2
    trace = OpTrace(tuple(mesh))
    failure = ""
    with fake_world(mesh):
        try:
            # What the program prints must not end up in the middle of the report.
            with trace, redirect_stdout(sys.stderr):
                _call(arguments.program, arguments.arguments, mesh)
        except ModelNotUsable as error:
            print(f"hyper-parallel: {error}", file=sys.stderr)
            return 2
        except SystemExit as error:  # how a script ends; a number other than 0 is its failure
            failure = "" if error.code in (None, 0) else f"the program ended with {error.code!r}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            failure = user_traceback(error)
    steps = [(step, 1) for step in trace.steps] if arguments.all else folded(trace.steps)
    if arguments.html is not None:
        arguments.html.write_text(_as_html(arguments, trace, steps), encoding="utf-8")
    if arguments.json:
        print_json(
            program=arguments.program,
            mesh=mesh,
            ok=not failure,
            steps=[{**asdict(step), "times": times} for step, times in steps],
            totals=[dict(zip(_TOTALS, row, strict=True)) for row in _totals(trace)],
            memory=trace.modules.memory(),
        )
    else:
        _print(trace, [] if arguments.summary else steps)
    if failure:
        print(f"\n{failure}", file=sys.stderr)
    return int(bool(failure))


def _call(program: str, arguments: Sequence[str], mesh: dict[str, int]) -> Any:
    from hyper_parallel.analysis.fake_world import fake_mesh
    from hyper_parallel.analysis.sample_models import ModelNotUsable, load_function

    if Path(program).is_file():
        before = sys.argv, list(sys.path)
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).resolve().parent))
        try:
            return runpy.run_path(program, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = before
    if ":" not in program:
        raise ModelNotUsable(f"{program!r} is neither a file nor package:function")
    function = load_function(program)
    return function(fake_mesh(mesh)) if inspect.signature(function).parameters else function()


# -- text ---------------------------------------------------------------------------------------------------------


def _print(trace: OpTrace, steps: Sequence[tuple[OpStep, int]]) -> None:
    if not trace.steps:
        print("no operator was called on a DTensor, and nothing was communicated")
        return
    rows = _totals(trace)
    if rows:
        print_table([title.upper() for title in _TOTALS], rows)
    else:
        print("nothing was communicated")
    if trace.modules.roots:
        print(_memory(trace))
    if steps:
        print(f"\nlayouts are written per mesh axis: {', '.join(trace.axis_names)}\n")
    for step, times in steps:
        print(f"{step.name}{f'  x{times}' if times > 1 else ''}")
        print("\n".join(f"  {label:<5} {text}" for label, text in _lines(step)))


def _memory(trace: OpTrace) -> str:
    """The memory of this rank, on one line."""
    from hyper_parallel.analysis.op_trace import readable_size

    parts = trace.modules.memory()
    return "memory on this rank: " + ", ".join(f"{name} {readable_size(nbytes)}" for name, nbytes in parts.items())


def _lines(step: OpStep) -> list[tuple[str, str]]:
    lines = [("mod", step.module)] if step.module else []
    lines.append(("at", step.where))
    if step.inputs:
        lines.append(("in", "   ".join(step.inputs)))
    paid = {collective.change for collective in step.collectives}
    moves = [change if change in paid else f"{change}, free" for change in step.changes]
    lines += [("move", text) for text in _counted(moves)]
    lines += [("comm", text) for text in _counted(map(str, step.collectives))]
    if step.outputs:
        lines.append(("out", "   ".join(step.outputs)))
    if step.error:
        lines += [("error", line) for line in step.error.splitlines()]
    return lines


def _counted(texts: Iterable[str]) -> list[str]:
    """Equal texts once, with their number."""
    return [text if times == 1 else f"{text}  x{times}" for text, times in Counter(texts).items()]


_TOTALS = ("collective", "calls", "bytes", "axes")


def _totals(trace: OpTrace) -> list[tuple[str, str, str, str]]:
    """Calls and bytes per kind of collective and axes."""
    sums: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for collective in trace.collectives:
        found = sums.setdefault((collective.op, collective.axes), [0, 0])
        found[0] += 1
        found[1] += collective.nbytes
    return [(op, str(n), str(size), ",".join(axes)) for (op, axes), (n, size) in sorted(sums.items())]


# -- HTML ---------------------------------------------------------------------------------------------------------


def _as_html(arguments: argparse.Namespace, trace: OpTrace, steps: Sequence[tuple[OpStep, int]]) -> str:
    from hyper_parallel.analysis.html_report import ReportTable, html_report

    rows, marks = [], []
    for step, times in steps:
        about = _lines(step)

        def cell(*labels: str, lines: Sequence[tuple[str, str]] = about) -> str:
            return "\n".join(text for label, text in lines if label in labels)

        inputs, outputs = "\n".join(step.inputs), "\n".join(step.outputs)
        told = outputs or cell("error")
        rows.append((step.name, str(times), step.module, inputs, cell("move"), cell("comm"), told, step.where))
        marks.append("bad" if step.error else "note" if step.collectives else "")
    header = ("operator", "times", "module", "inputs", "redistributions", "collectives", "outputs", "where")
    tables = [
        ReportTable("Communication", _TOTALS, _totals(trace)),
        ReportTable("Operators, in order", header, rows, marks),
    ]
    axes = ", ".join(trace.axis_names)
    summary = [f"Mesh {arguments.mesh}; layouts are written per mesh axis: {axes}.", f"{_memory(trace)}."]
    return html_report(f"What {Path(arguments.program).name} does", summary, tables)


COMMAND = Command(
    "explain", "run a program on a pretended mesh and show layouts and communication", _run, _add_arguments
)
