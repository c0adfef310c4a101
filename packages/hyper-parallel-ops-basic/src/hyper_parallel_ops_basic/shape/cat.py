"""Several tensors into one: ``cat``, ``stack``, ``vstack``, ``hstack``.

Concatenating tensors along the dimension that one mesh axis shards needs no communication: each rank joins its pieces,
which is what a :class:`~hyper_parallel.PackedShard` with the tensors' sections says. Where several axes
shard it no placement says so: one all-to-all brings the elements to a plain shard of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hyper_parallel import Layout, PackedShard, Placement, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    OpSummary,
    R,
    S,
    Solution,
    dim_intervals,
    fit_rank,
    indices_of,
    is_shard,
    normal_dim,
    pending_rows,
    plain,
)


def packed_or_plain(dim: int, sections: Sequence[int]) -> Placement:
    """The shard of ``dim`` whose sections are sharded each on its own; plain when only one is not empty."""
    filled = tuple(n for n in sections if n)
    return PackedShard(dim, filled) if len(filled) > 1 else S(dim)


def sections_of(placement: Placement, size: int) -> tuple[int, ...]:
    """The parts of a dim of this size that a shard of it cuts each on its own."""
    return tuple(placement.sections) if isinstance(placement, PackedShard) else (size,)


class Cat(StrategyOp):
    """``cat(tensors, dim)``.

    Args:
        at_least: rank to which smaller tensors are raised first, with the new dims in front (2 for ``vstack``).
        dim: dimension, for a function that has no argument for it.
    """

    summary = OpSummary(
        "every dim, operands alike; the joined one, on one axis, becomes `PackedShard`",
        pending="passes when all are pending alike",
        communicates="joined dim that several axes shard: 1 all-to-all of the elements that change rank | the same",
    )

    signature = "tensors, dim=0"

    def __init__(self, op_name: str, *, at_least: int = 1, dim: int | None = None) -> None:
        super().__init__(op_name)
        self.at_least, self.fixed = at_least, dim

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ndim, dim, joined = self._parts(call)
        for d in range(ndim):
            own = {i: d - (ndim - len(call.inputs[i].shape)) for i in joined}
            if min(own.values()) < 0:
                continue
            if d != dim:
                yield Strategy([S(own[i]) if i in own else R for i in range(len(call.inputs))], S(d))
                continue
            axes = {a for i, at in own.items() for a in call.inputs[i].layout.shard_order[at]}
            rows = {tuple(self._placements(call, own, axis)): None for axis in sorted(axes)}
            for row in rows:
                sections = [n for i, at in own.items() for n in sections_of(row[i], call.inputs[i].shape[at])]
                yield Strategy(row, S(d) if len(axes) > 1 else packed_or_plain(d, sections))
        yield from pending_rows(call)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        ndim, dim, joined = self._parts(call)
        (output,) = solution.outputs
        assert output is not None
        output = fit_rank(output, ndim)
        axes = output.shard_order[dim]
        own = {i: dim - (ndim - len(call.inputs[i].shape)) for i in joined}
        for axis in axes:  # the row of another axis may have been taken, which does not know how this one packs
            wanted = self._placements(call, own, axis)
            for i in joined:
                solution.targets[i] = solution.targets[i].with_placements({axis: wanted[i]})
        pieces = [(solution.targets[i], tuple(call.inputs[i].shape)) for i in joined]
        if len(axes) == 1:  # which the rows of each axis by itself cannot know
            sections = [n for t, sizes in pieces for n in sections_of(t.placements[axes[0]], sizes[dim - ndim])]
            output = output.with_placements({axes[0]: packed_or_plain(dim, sections)})
        elif axes:
            output = plain(output, [dim])
            func, move = call.func, _join(pieces, output, dim)
            solution.local = lambda *args, **kwargs: move(func(*args, **kwargs), dim)
        solution.outputs = [output]
        return solution

    def _parts(self, call: Call) -> tuple[int, int, list[int]]:
        """Rank of the result, the joined dim of it, and which tensors are joined along it."""
        shapes = [spec.shape for spec in call.inputs]
        # A tensor of shape (0,) joins tensors of any rank.
        joined = [i for i, shape in enumerate(shapes) if tuple(shape) != (0,) or self.at_least > 1] or list(
            range(len(shapes))
        )
        ndim = max(self.at_least, max(len(shapes[i]) for i in joined))
        given = call.arg("dim", 0) if self.fixed is None else min(self.fixed, ndim - 1)
        return ndim, normal_dim(given, ndim), joined

    @staticmethod
    def _placements(call: Call, own: dict[int, int], axis: int) -> list[Placement]:
        """Every joined tensor sharded along its dim, packed where it is."""
        wanted: list[Placement] = [R] * len(call.inputs)
        for i, at in own.items():
            have = call.inputs[i].layout.placements[axis]
            wanted[i] = have if is_shard(have) and have.dim == at else S(at)
        return wanted


def _join(pieces: Sequence[tuple[Layout, tuple[int, ...]]], output: Layout, dim: int) -> ExchangePlan:
    """From the ranks' pieces of tensors of these layouts and shapes, one after the other, to those of the result."""
    group = output.info.group(tuple(sorted(output.shard_order[dim])))
    total, held = 0, [torch.arange(0) for _ in group.coordinates]
    for layout, shape in pieces:
        own = dim - (output.ndim - len(shape))
        parts = [indices_of(dim_intervals(layout, shape, own, c)) + total for c in group.coordinates]
        held = [torch.cat(both) for both in zip(held, parts, strict=True)]
        total += shape[own]
    sizes = tuple(total if d == dim else 1 for d in range(output.ndim))
    return ExchangePlan(group, held, [indices_of(dim_intervals(output, sizes, dim, c)) for c in group.coordinates])


class HStack(Cat):
    """``hstack``: along dim 1, or dim 0 of vectors."""

    def __init__(self, op_name: str) -> None:
        super().__init__(op_name, at_least=1, dim=1)


class Stack(StrategyOp):
    """``stack(tensors, dim)``: tensors of one shape along a new dimension."""

    summary = OpSummary(
        "every dim, operands alike",
        pending="passes when all are pending alike",
    )

    signature = "tensors, dim=0"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ndim = len(call.inputs[0].shape)
        dim = normal_dim(call.arg("dim", 0), ndim + 1)
        for d in range(ndim):
            yield Strategy([S(d)] * len(call.inputs), S(d + (d >= dim)))
        yield from pending_rows(call)
