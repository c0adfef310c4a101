"""Random programs: drawn by running them on plain tensors, so that every step fits what is there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hyper_parallel.testing.layouts import Placed, tensor_placements

from .operations import OPERATIONS, Draw, Step

MOST = 4096
"""Elements of the largest value."""


@dataclass(frozen=True)
class Program:
    """Leaves, and what is done with them.

    Attributes:
        leaves: whole values, equal on all ranks.
        placed: how each leaf is sharded.
        steps: in order.
    """

    leaves: tuple[torch.Tensor, ...]
    placed: tuple[Placed, ...]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [
            f"${i} = leaf {tuple(t.shape)} {p}" for i, (t, p) in enumerate(zip(self.leaves, self.placed, strict=True))
        ]
        return "\n".join([*lines, *(f"      {step.text}" for step in self.steps)])


def draw_program(seed: int, mesh_ndim: int, length: int) -> Program:
    """The program of a seed: equal on all ranks."""
    draw = Draw(seed, mesh_ndim)
    leaves = tuple(draw.tensor(draw.random.choices([1, 2, 3, 4, 5, 8], k=draw.random.randint(1, 3))) for _ in range(3))
    placed = tuple(draw.random.choice(tensor_placements(t.shape, mesh_ndim, with_partial=True)) for t in leaves)
    values: list[torch.Tensor] = [t.clone().requires_grad_() for t in leaves]
    steps: list[Step] = []
    for _ in range(20 * length):
        if len(steps) == length:
            break
        step = draw.random.choice(OPERATIONS)(draw, values)
        if step is None or not fits(step, values):
            continue
        with contextlib.suppress(RuntimeError):  # a write to memory that several elements share
            values += run(step, values)
            steps.append(step)
    return Program(leaves, placed, tuple(steps))


def fits(step: Step, values: Sequence[torch.Tensor]) -> bool:
    """Whether plain torch takes a step; it is tried on copies, since it may write."""
    copies = [v.detach().clone() for v in values]
    try:
        results = run(step, copies)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return all(t.numel() <= MOST and t.isfinite().all() for t in results)


def run(step: Step, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a step adds to the values of a program; nothing where it writes."""
    out = step.run(*(values[i] for i in step.inputs))
    if step.in_place:
        return []
    return list(out) if isinstance(out, tuple) else [out]


def execute(
    program: Program, leaves: Sequence[torch.Tensor], steps: int, cotangent: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """Run the first steps and the backward of what they give.

    Args:
        program: whose steps.
        leaves: plain tensors or DTensors.
        steps: how many.
        cotangent: from a value and its number to what it is multiplied by in the sum that is the loss.

    Returns:
        all values, leaves first.
    """
    values = list(leaves)
    for step in program.steps[:steps]:
        values += run(step, values)
    terms = [(v * cotangent(v, i)).sum() for i, v in enumerate(values) if v.is_floating_point() and v.requires_grad]
    total = functools.reduce(torch.add, terms)
    total.backward()
    return values
