"""Compares every operator that has a rule with plain PyTorch, on PyTorch's own samples (``nox -s battery``).

PyTorch keeps a database of its operators with sample inputs, by which it tests itself. Each sample is called with one
dim of one tensor argument sharded over four gloo ranks after the other (and over a 2 x 2 mesh), forward and backward,
in place too, under the default policy of redistribution and under ``auto``, and must give what one device gives.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.testing import RanksFailed, WorkerPool
from hyper_parallel.testing.thread_ranks import run_on_threads

from .on_ranks import VERDICTS, Choice, Verdict, run_function
from .report import report
from .samples import operators, title_of

RANKS = 4
TIMEOUT = 120.0
"""Seconds for the cases of one function."""


def main() -> int:
    """Run the battery; the exit status is 1 when a case is wrong, hangs or raises what is no refusal of ours."""
    parser = argparse.ArgumentParser(prog="nox -s battery --", description=__doc__.split("\n")[0])
    parser.add_argument(
        "functions", nargs="?", default="", help="pattern of the functions' names, '^nn.functional.pad$'"
    )
    parser.add_argument("--case", default="", help="pattern of the cases' titles as the report shows them, 'pad#3 4:'")
    parser.add_argument("--samples", type=int, default=6, help="samples taken of each function")
    parser.add_argument(
        "--dtype", help="that of the samples, bfloat16 or complex128; by default float64 where it can be"
    )
    parser.add_argument("--policies", default="partial,auto")
    parser.add_argument("--axes", default="1,2", help="mesh axes: 1 is a mesh of 4, 2 one of 2 x 2")
    parser.add_argument("--threads", action="store_true", help="ranks are threads of this process, for a quick look")
    parser.add_argument("--json", type=Path, help="file to which all verdicts are added, one a line, as they come")
    options = parser.parse_args()
    axes = tuple(map(int, options.axes.split(",")))
    choice = Choice(options.samples, tuple(options.policies.split(",")), axes, options.case, options.dtype)
    results: dict[str, list[Verdict]] = {}
    without_tensors = []
    with WorkerPool(RANKS, timeout=20) as pool:
        run = _on_threads if options.threads else pool.run
        for op in operators(options.functions):
            start = time.monotonic()
            verdicts = _verdicts(run, title_of(op), choice)
            if options.json:
                with options.json.open("a") as file:
                    file.writelines(json.dumps(vars(verdict)) + "\n" for verdict in verdicts)
            if verdicts:
                results[title_of(op)] = verdicts
            elif not options.case:
                without_tensors.append(title_of(op))
            print(
                f"{title_of(op)}: {len(verdicts)} cases, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True
            )
    print(report(results, without_tensors))
    return int(any(v.kind in ("wrong", "raw error", "hang") for found in results.values() for v in found))


def _verdicts(run: Callable[..., Any], function: str, choice: Choice) -> list[Verdict]:
    """The verdicts of a function's cases. A case that ranks do not come back from is tried twice: they may be slow."""
    times: Counter[str] = Counter()
    lost: dict[str, Verdict] = {}
    while True:
        try:
            by_rank = run(run_function, function, choice, set(lost), timeout=TIMEOUT)
        except RanksFailed as error:
            case, *text = "\n".join(error.texts()).split("\n")
            if not case.startswith(function):  # no matter of one case
                case, text = f"{function}# -", [str(error)]
            times[case] += 1
            if times[case] == 2:
                lost[case] = Verdict(case, "hang", "\n".join(text))
            if f"{function}# -" in lost:
                return list(lost.values())
        else:
            return [*lost.values(), *(_told(same_case) for same_case in zip(*by_rank, strict=True))]


def _on_threads(function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
    return run_on_threads(RANKS, function, args, timeout=timeout)


def _told(same_case: tuple[Verdict, ...]) -> Verdict:
    """Of the ranks' verdicts on one case the worst: the others may have seen nothing wrong in their pieces."""
    return max(same_case, key=lambda verdict: VERDICTS.index(verdict.kind))


if __name__ == "__main__":
    sys.exit(main())
