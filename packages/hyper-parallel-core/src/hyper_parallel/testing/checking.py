"""The rank's side of the conformance kit: an operator on one layout after the other.

Every rank takes the same decisions, as these depend only on what all ranks know. What differs (a wrong value in one
rank's piece) is noted and reported at the end, so that no rank leaves the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel._rules.matching import Row
from hyper_parallel.sharding.mesh import DeviceMesh
from hyper_parallel.sharding.placements import Replicate
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.testing.case_runner import CaseRunner, OpUnderTest
from hyper_parallel.testing.failures import CaseFailed
from hyper_parallel.testing.findings import Findings, Problem
from hyper_parallel.testing.inputs import Sample
from hyper_parallel.testing.layouts import Case
from hyper_parallel.testing.placing import make, mesh_of
from hyper_parallel.testing.reproduction import title
from hyper_parallel.testing.strategy_rows import rows_of
from hyper_parallel.testing.writing_forms import InPlaceRunner, OutRunner


@dataclass
class Outcome:
    """What one rank saw: how many cases it ran, how many the default policy refused, and what was wrong."""

    ran: int
    refused: int
    problems: list[Problem]


RUNNERS: dict[str, type[CaseRunner]] = {"layouts": CaseRunner, "inplace": InPlaceRunner, "out": OutRunner}


def listed_rows(func: Callable[..., Any], sample: Sample, values: Sequence[torch.Tensor], mesh_shape: Any) -> list[Row]:
    """The strategies that the operator lists for a sample; they need a mesh, so a rank is asked."""
    return rows_of(func, sample, _replicas(sample, values, mesh_of(mesh_shape)))


def check_cases(
    op: OpUnderTest,
    sample: Sample,
    values: Sequence[torch.Tensor],
    mesh_shape: tuple[int, ...],
    cases: Sequence[Case],
    form: str = "layouts",
) -> Outcome:
    """Run every case.

    Args:
        form: ``"layouts"``, ``"inplace"`` or ``"out"``: in which form the operator is called.
    """
    mesh = mesh_of(mesh_shape)
    findings = Findings()
    refused = 0
    for case in cases:
        runner = None
        try:
            runner = RUNNERS[form](op, sample, values, mesh, case, findings)
            runner.run()
        except Exception as error:
            policy = "strict" if runner is None else runner.policy  # a strategy for a dim that the input does not have
            found = [p.text for p in findings.problems if (p.case, p.policy) == (case, policy)]
            found += filter(None, [None if runner is None else runner.wrong_on_meta()])
            name = title(mesh_shape, case, policy)
            raise CaseFailed("\n".join([name, *found, f"{type(error).__name__}: {error}"])) from error
        refused += runner.refused
    findings.settle()
    return Outcome(len(cases), refused, findings.problems)


def _replicas(sample: Sample, values: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[DTensor]:
    return [
        make(v, mesh, [Replicate()] * mesh.ndim, requires_grad=g)
        for v, g in zip(values, sample.wants_grad(), strict=True)
    ]
