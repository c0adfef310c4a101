"""What one rank finds out about an operator: the problems, and the comparisons that are still to be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial, Replicate
from hyper_parallel.testing.layouts import Case


@dataclass(frozen=True)
class Problem:
    """Something wrong that this rank saw in one case under one redistribute policy."""

    case: Case
    policy: str
    text: str


class Findings:
    """Collects problems. Pending reductions are compared at the end, with one all-reduce for many of them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._pending: dict[Any, list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]] = {}

    def note(self, case: Case, policy: str, text: str | None) -> None:
        """Keep a problem; None is none."""
        if text is not None:
            self.problems.append(Problem(case, policy, text))

    def when_reduced(self, layout: Layout, term: torch.Tensor, judge: Callable[[torch.Tensor], None]) -> None:
        """Call ``judge`` with the reduction of the ranks' terms, later; all ranks must ask for it in the same order."""
        flat = layout.with_order(tuple(p if isinstance(p, Partial) else Replicate() for p in layout.placements), ((),))
        self._pending.setdefault((flat, term.dtype), []).append((term, judge))

    def settle(self) -> None:
        """Carry out the reductions and judge them."""
        for (layout, _), waiting in self._pending.items():
            flat = torch.cat([term.reshape(-1) for term, _ in waiting])
            whole = plan_transition(layout, layout.replicated(), (flat.numel(),)).run(flat)
            for (term, judge), value in zip(waiting, whole.split([term.numel() for term, _ in waiting]), strict=True):
                judge(value.view(term.shape))
        self._pending.clear()
