"""The rank's side of the conformance kit: an operator on one layout after the other.

Every rank takes the same decisions, as these depend only on what all ranks know. What differs (a wrong value in one
rank's piece) is noted and reported at the end, so that no rank leaves the others waiting in a collective.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyper_parallel.dtensor import DTensor
from hyper_parallel.mesh import DeviceMesh
from hyper_parallel.placements import PackedShard, Partial, Replicate, Shard
from hyper_parallel.testing.case_runner import CaseRunner, OpUnderTest
from hyper_parallel.testing.findings import Findings, Problem
from hyper_parallel.testing.inputs import Sample
from hyper_parallel.testing.layouts import Case, Placed
from hyper_parallel.testing.placing import make, mesh_of
from hyper_parallel.testing.reproduction import title
from hyper_parallel.testing.strategy_rows import Row, rows_of
from hyper_parallel.testing.writing_forms import InPlaceRunner, OutRunner


@dataclass
class Outcome:
    """What one rank saw: how many cases it ran, how many the default policy refused, and what was wrong."""

    ran: int
    refused: int
    problems: list[Problem]


RUNNERS: dict[str, type[CaseRunner]] = {"layouts": CaseRunner, "inplace": InPlaceRunner, "out": OutRunner}


class CaseFailed(AssertionError):
    """A case ended in an exception that is no refusal. ``str()`` names the case."""


def check_layouts(
    op: OpUnderTest,
    sample: Sample,
    values: Sequence[torch.Tensor],
    mesh_shape: tuple[int, ...],
    cases: Sequence[Case],
    limit: int,
    form: str = "layouts",
) -> Outcome:
    """Run every listed strategy (on two axes ``limit // 2`` pairs of them) and every case.

    Args:
        form: ``"layouts"``, ``"inplace"`` or ``"out"``: in which form the operator is called.
    """
    mesh = mesh_of(mesh_shape)
    strategies: list[Case] = []
    if form == "layouts":
        rows = rows_of(op.func, sample, _replicas(sample, values, mesh))
        strategies = strategy_cases(rows, sample, mesh.ndim, limit // 2)
    findings = Findings()
    refused = 0
    for case in (*strategies, *cases):
        runner = RUNNERS[form](op, sample, values, mesh, case, findings)
        try:
            runner.run()
        except Exception as error:
            raise CaseFailed(f"{title(mesh_shape, case, runner.policy)}\n{type(error).__name__}: {error}") from error
        refused += runner.refused
    findings.settle()
    return Outcome(len(strategies) + len(cases), refused, findings.problems)


def strategy_cases(rows: Sequence[Row], sample: Sample, mesh_ndim: int, limit: int) -> list[Case]:
    """A case per strategy on a 1-D mesh, on a 2-D mesh per pair of strategies (``limit`` pairs when there are more)."""
    combinations: list[tuple[Row, ...]] = [(row,) for row in rows]
    if mesh_ndim == 2:
        pairs = [(a, b) for a in rows for b in rows if _can_join(a, b)]
        combinations = list(random.Random(0).sample(pairs, min(limit, len(pairs))))
    found = []
    for combination in combinations:
        only_sums = all(not isinstance(p, Partial) or p.reduce_op == "sum" for row in combination for p in row.inputs)
        inputs = [
            Placed(tuple(row.inputs[i] for row in combination), grad=wants and only_sums)
            for i, wants in enumerate(sample.wants_grad())
        ]
        outputs = tuple(zip(*(row.outputs for row in combination), strict=True))
        found.append(Case(tuple(inputs), outputs))
    return found


def _can_join(a: Row, b: Row) -> bool:
    """Whether there is such a layout: one kind of pending reduction per tensor, a packed shard only outermost."""
    for x, y in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
        if isinstance(x, Partial) and isinstance(y, Partial) and x != y:
            return False
        if isinstance(x, Shard) and isinstance(y, PackedShard) and x.dim == y.dim:
            return False
    return True


def _replicas(sample: Sample, values: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[DTensor]:
    return [
        make(v, mesh, [Replicate()] * mesh.ndim, requires_grad=g)
        for v, g in zip(values, sample.wants_grad(), strict=True)
    ]
