"""One tensor into several along a dimension: ``split``, ``chunk``, ``tensor_split``, ``unbind``.

Along a sharded dimension the pieces stay where they are, without communication, when the shards allow it: a
:class:`~hyper_parallel.placements.PackedShard` at its section bounds gives plain shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.call import Call, Solution, normal_dim, refuse
from hyper_parallel.families.ranges import Kept, fit_ranges
from hyper_parallel.placements import Replicate, on_dim
from hyper_parallel.strategy import LayoutOp


class Split(LayoutOp):
    """``split``, ``split_with_sizes``, ``chunk``, ``tensor_split``, and with a fixed dimension ``hsplit`` and so on.

    Args:
        dim: dimension, when the function has no argument for it.
    """

    makes_views = True

    signature = (
        "input, sizes=None, dim=0, *, split_size_or_sections, split_size, split_sizes, chunks, indices_or_sections"
    )

    def __init__(self, op_name: str, *, dim: int | None = None) -> None:
        super().__init__(op_name)
        self.fixed = dim

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        ndim = len(spec.shape)
        dim = normal_dim(call.arg("dim", 0) if self.fixed is None else min(self.fixed, ndim - 1), ndim)
        lengths = [shape[dim] for shape in call.output_shapes()]
        bounds = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        ranges = [range(a, b) for a, b in bounds]
        if sum(lengths) != spec.shape[dim] and spec.layout.shard_order[dim]:
            raise refuse(
                call,
                "the sections overlap or leave elements out",
                "redistribute the split dimension to Replicate first",
            )
        layout, kept = fit_ranges(spec.layout, tuple(spec.shape), dim, ranges)
        if layout is not spec.layout and call.mode.policy != "auto":
            raise refuse(
                call,
                f"the shards of dimension {dim} do not fall on the bounds of the pieces {lengths}",
                f"redistribute to {layout} first, shard it with PackedShard({dim}, {tuple(lengths)}), or use "
                "redistribute_policy('auto')",
            )
        outputs = []
        for piece in kept:
            placements = list(layout.placements)
            for axis, placement in piece.placements.items():
                placements[axis] = on_dim(placement, dim)
            outputs.append(layout.with_order(tuple(placements), layout.shard_order))
        local = _split_locally(kept, dim) if layout.shard_order[dim] else None
        return Solution([layout], list(outputs), local, is_view=True)


def _split_locally(kept: list[Kept], dim: int) -> Callable[..., Any]:
    slices = [k.local for k in kept]
    filled = [s for s in slices if s.stop > s.start]
    sizes = [s.stop - s.start for s in slices]
    if all(a.stop == b.start for a, b in itertools.pairwise(filled)) and (not filled or filled[0].start == 0):
        # One node of the autograd graph, whose backward is one concatenation.
        return lambda x, *args, **kwargs: x.split(sizes, dim) if sum(sizes) == x.shape[dim] else _cut(x, slices, dim)
    return lambda x, *args, **kwargs: _cut(x, slices, dim)


def _cut(x: torch.Tensor, slices: list[slice], dim: int) -> tuple[torch.Tensor, ...]:
    return tuple(x.narrow(dim, s.start, s.stop - s.start) for s in slices)


class Unbind(LayoutOp):
    """``unbind``: the dimension goes away, so it cannot stay sharded."""

    makes_views = True

    signature = "input, dim=0"

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        dim = call.dim("dim", default=0)
        assert dim is not None
        layout = spec.layout.with_placements({a: Replicate() for a in spec.layout.shard_order[dim]})
        if layout is not spec.layout and call.mode.policy != "auto":
            raise refuse(
                call,
                f"dimension {dim} is sharded and would go away",
                f"redistribute to {layout} first, or use redistribute_policy('auto')",
            )
        mapping = [None if d == dim else d - (d > dim) for d in range(len(spec.shape))]
        output = layout.move_dims(mapping, len(spec.shape) - 1)
        return Solution([layout], [output] * spec.shape[dim], is_view=True)
