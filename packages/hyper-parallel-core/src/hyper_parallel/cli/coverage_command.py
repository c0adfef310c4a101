"""``hyper-parallel coverage MODEL``: before any cluster time is spent, whether every function of a model has a rule."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.cli.reporting import print_json, print_table
from hyper_parallel.plugins import Command, default_manager
from hyper_parallel.plugins.record import how_to_get
from hyper_parallel.registry import Registry
from hyper_parallel.registry.messages import TUTORIAL

if TYPE_CHECKING:
    from hyper_parallel.analysis.coverage import FunctionCoverage
    from hyper_parallel.analysis.function_trace import FunctionTrace


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a transformers model id, a model type such as qwen3, a config.json or its folder, or package:function, "
        "which returns a module, or a module and its batch",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as HTML")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    from hyper_parallel.analysis.coverage import coverage_of
    from hyper_parallel.analysis.sample_models import ModelNotUsable

    try:
        how, trace = _traced(arguments.model)
    except ModelNotUsable as error:
        print(f"hyper-parallel: {error}", file=sys.stderr)
        return 2
    found = coverage_of(trace, Registry(default_manager()))
    lacking = [one for one in found if one.status != "ok"]
    summary = f"{len(found) - len(lacking)} of {len(found)} functions have a rule"
    if arguments.html is not None:
        arguments.html.write_text(_as_html(arguments.model, how, summary, found), encoding="utf-8")
    if arguments.json:
        print_json(model=arguments.model, built=how, ok=not lacking, functions=[asdict(one) for one in found])
        return int(bool(lacking))
    print(f"one training step of {arguments.model}, {how}\n")
    rows = [(one.name, str(one.calls), one.status, one.provider or "-") for one in found]
    print_table(("FUNCTION", "CALLS", "STATUS", "PROVIDER"), rows, [_advice(one) for one in found])
    print(f"\n{summary}{'; lacking: ' + ', '.join(one.name for one in lacking) if lacking else ''}")
    return int(bool(lacking))


def _traced(name: str) -> tuple[str, FunctionTrace]:
    """How the model was built, and the trace of its step; what fails in one way of building is tried in the next."""
    from hyper_parallel.analysis.coverage import trace_training_step
    from hyper_parallel.analysis.sample_models import ModelNotUsable, sample_models

    failures = []
    for sample in sample_models(name):
        try:
            return sample.how, trace_training_step(sample)
        except ModelNotUsable:
            raise
        except Exception as error:
            if ":" in name:  # the user's own function: its traceback says more than we do
                raise
            failures.append(
                f"  {sample.how}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    raise ModelNotUsable(
        f"no training step of {name} could be run:\n" + "\n".join(failures) + "\n"
        "  write a function that returns a small model and its batch, and give it as package:function"
    )


def _advice(one: FunctionCoverage) -> str:
    if one.status == "ok":
        return ""
    lines = [] if one.status == "missing" else one.reason.splitlines()
    if one.status == "missing":
        lines.append(
            f"{one.pack} has one, but {how_to_get(one.pack, default_manager().records())}"
            if one.pack
            else f"no pack of ours has one; to add one: {TUTORIAL}"
        )
    return "\n".join([*lines, f"first called at {one.where}"])


def _as_html(model: str, how: str, summary: str, found: list[FunctionCoverage]) -> str:
    from hyper_parallel.analysis.html_report import ReportTable, html_report

    header = ("function", "calls", "status", "provider", "rule", "first call", "what to do")
    rows = [
        (one.name, str(one.calls), one.status, one.provider or "", one.source or "", one.where, _advice(one))
        for one in found
    ]
    marks = ["" if one.status == "ok" else "bad" for one in found]
    table = ReportTable("Functions called on tensors that would be sharded", header, rows, marks)
    return html_report(f"Coverage of {model}", [f"One training step, {how}.", f"{summary}."], [table])


COMMAND = Command("coverage", "check that every function of a model's training step has a rule", _run, _add_arguments)
