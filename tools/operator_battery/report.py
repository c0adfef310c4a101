"""The table of a run, and its failing cases."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .on_ranks import VERDICTS, Verdict


def report(results: Mapping[str, Sequence[Verdict]], without_tensors: Sequence[str]) -> str:
    """Every case that is not right, grouped by function, and the counts.

    Args:
        results: verdicts by function.
        without_tensors: functions whose samples hold no tensor, so that there is nothing to shard.
    """
    parts = [_of_function(function, verdicts) for function, verdicts in results.items()]
    parts += ["", _counts(results)]
    missing = [f for f, verdicts in results.items() if verdicts and {v.kind for v in verdicts} == {"no rule"}]
    parts += ["", f"no rule ({len(missing)}): {', '.join(missing)}"]
    parts += [f"no tensor argument ({len(without_tensors)}): {', '.join(without_tensors)}"]
    return "\n".join(filter(lambda part: part is not None, parts))


def _of_function(function: str, verdicts: Sequence[Verdict]) -> str | None:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.kind not in ("right", "no rule"):
            groups[verdict.kind, _kind_of_text(verdict)].append(verdict.case)
    if not groups:
        return None
    lines = [f"{function}: {_summary(verdicts)}"]
    for (kind, text), cases in sorted(groups.items(), key=lambda item: -VERDICTS.index(item[0][0])):
        lines += [f"  {kind}: {text}", *(f"    {case}" for case in cases[:4])]
        lines += [f"    and {len(cases) - 4} more"] if len(cases) > 4 else []
    return "\n".join(lines)


def _kind_of_text(verdict: Verdict) -> str:
    """The first line, without the numbers by which two messages of one kind differ."""
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", verdict.text.split("\n")[0])[:160]


def _summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.kind for verdict in verdicts)
    return ", ".join(f"{counts[kind]} {kind}" for kind in VERDICTS if counts[kind])


def _counts(results: Mapping[str, Sequence[Verdict]]) -> str:
    """One row per policy: how many cases ended in which way."""
    every = [verdict for verdicts in results.values() for verdict in verdicts]
    samples = {verdict.case.split(" ")[0] for verdict in every}
    policies = sorted({verdict.case.rpartition(" ")[2] for verdict in every})
    lines = [f"{len(results)} functions, {len(samples)} samples, {len(every)} cases"]
    lines += [f"{'policy':<10}" + "".join(f"{kind:>12}" for kind in VERDICTS)]
    for policy in policies:
        counts = Counter(v.kind for v in every if v.case.endswith(f" {policy}"))
        lines += [f"{policy:<10}" + "".join(f"{counts[kind]:>12}" for kind in VERDICTS)]
    return "\n".join(lines)
