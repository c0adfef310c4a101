"""One tensor into several along a dimension: ``split``, ``chunk``, ``tensor_split``, ``unbind``.

Along a sharded dimension the pieces stay where they are, without communication, when the shards allow it: a
:class:`~hyper_parallel.PackedShard` at its section bounds gives plain shards. Otherwise each piece is
sharded anew, all by one all-to-all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Replicate
from hyper_parallel.rules import (
    NOT_VARYING,
    Call,
    ExchangePlan,
    Kept,
    LayoutOp,
    OpSummary,
    Solution,
    dim_intervals,
    indices_of,
    keep_range,
    normal_dim,
    on_dim,
    plain,
    refuse,
    transition,
)


class Split(LayoutOp):
    """``split``, ``split_with_sizes``, ``chunk``, ``tensor_split``, and with a fixed dimension ``hsplit`` and so on.

    Args:
        dim: dimension, when the function has no argument for it.
    """

    summary = OpSummary(
        "every dim; pieces that stay in place are views",
        pending="passes, of any kind",
        communicates="pieces that do not stay in place: 1 all-to-all of what changes rank, for all together | the same",
        whole="sections that overlap",
    )

    makes_views = True

    signature = (
        "input, sizes=None, dim=0, *, split_size_or_sections, split_size, split_sizes, chunks, sections, indices, "
        "indices_or_sections"
    )

    def __init__(self, op_name: str, *, dim: int | None = None) -> None:
        super().__init__(op_name)
        self.fixed = dim

    carries_writes = True

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        target = args[0]
        dim = self._dim(self.arguments.bind(args, kwargs), target.ndim)
        pieces = func(torch.empty(target.shape, device="meta"), *args[1:], **kwargs)
        start = sum(piece.shape[dim] for piece in pieces[:position])
        shown = slice(start, start + pieces[position].shape[dim])
        target[(slice(None),) * dim + (shown,)] = value

    def _dim(self, given: Mapping[str, Any], ndim: int) -> int:
        return normal_dim(given.get("dim", 0) if self.fixed is None else min(self.fixed, ndim - 1), ndim)

    def solve(self, call: Call) -> Solution:
        for name in ("sizes", "indices_or_sections"):
            call.numbers(name)  # tensor_split takes a tensor of them
        spec = call.inputs[0]
        ndim = len(spec.shape)
        dim = self._dim(call.bound, ndim)
        lengths = [shape[dim] for shape in call.output_shapes()]
        bounds = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        ranges = [range(a, b) for a, b in bounds]
        if sum(lengths) != spec.shape[dim] and spec.layout.shard_order[dim]:
            raise refuse(
                call,
                "the sections overlap or leave elements out",
                "redistribute the split dimension to Replicate first",
            )
        layout, shape = spec.layout, tuple(spec.shape)
        kept = [piece for picked in ranges if (piece := keep_range(layout, shape, dim, picked)) is not None]
        if len(kept) < len(ranges):
            return self._dealt(layout, shape, dim, ranges, call.name)
        outputs = []
        for piece in kept:
            placements = list(layout.placements)
            for axis, placement in piece.placements.items():
                placements[axis] = on_dim(placement, dim)
            outputs.append(layout.with_order(tuple(placements), layout.shard_order))
        local = _split_locally(kept, dim, call.name) if layout.shard_order[dim] else None
        return Solution([layout], list(outputs), local, is_view=True)

    @staticmethod
    def _dealt(layout: Layout, shape: tuple[int, ...], dim: int, ranges: list[range], name: str) -> Solution:
        """Each piece sharded anew, all by one all-to-all."""
        output = plain(layout, [dim])

        def parts(coordinate: tuple[int, ...]) -> list[torch.Tensor]:
            """What a rank gets of each piece."""
            sizes = [tuple(len(r) if d == dim else n for d, n in enumerate(shape)) for r in ranges]
            held = [indices_of(dim_intervals(output, size, dim, coordinate)) for size in sizes]
            return [r.start + h for r, h in zip(ranges, held, strict=True)]

        move = ExchangePlan.along(layout, shape[dim], dim, lambda coordinate: torch.cat(parts(coordinate)))
        sizes = [len(part) for part in parts(layout.info.my_coordinate())]
        cut = _at_once(sizes, dim, name)
        return Solution([layout], [output] * len(ranges), lambda x, *args, **kwargs: cut(move(x, dim)), copies=True)


# Functions whose results PyTorch makes one by one, so that they may be written to while gradients are on.
_ONE_BY_ONE = ("tensor_split", "hsplit", "vsplit", "dsplit")


def _at_once(sizes: list[int], dim: int, name: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """The pieces of these sizes, in one node of the autograd graph, whose backward is one concatenation, where PyTorch
    has one node too."""
    if name not in _ONE_BY_ONE:
        return lambda x: x.split(sizes, dim)
    stops = itertools.accumulate(sizes)
    slices = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    return lambda x: _cut(x, slices, dim)


def _split_locally(kept: list[Kept], dim: int, name: str) -> Callable[..., Any]:
    slices = [k.local for k in kept]
    filled = [s for s in slices if s.stop > s.start]
    sizes = [s.stop - s.start for s in slices]
    if all(a.stop == b.start for a, b in itertools.pairwise(filled)) and (not filled or filled[0].start == 0):
        cut = _at_once(sizes, dim, name)
        return lambda x, *args, **kwargs: cut(x) if sum(sizes) == x.shape[dim] else _cut(x, slices, dim)
    return lambda x, *args, **kwargs: _cut(x, slices, dim)


def _cut(x: torch.Tensor, slices: list[slice], dim: int) -> tuple[torch.Tensor, ...]:
    return tuple(x.narrow(dim, s.start, s.stop - s.start) for s in slices)


class Unbind(LayoutOp):
    """``unbind``. Of a sharded dimension every result lies on one rank and is wanted on all: one all-gather."""

    summary = OpSummary(
        "every dim",
        pending="passes, of any kind",
        communicates="sharded unbound dim: 1 all-gather | slice",
        whole="the unbound dim: every result lies on one rank and is wanted on all",
    )

    makes_views = True

    signature = "input, dim=0"

    carries_writes = True

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        dim = normal_dim(self.arguments.bind(args, kwargs).get("dim", 0), args[0].ndim)
        args[0][(slice(None),) * dim + (position,)] = value

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        dim = call.dim("dim", default=0)
        assert dim is not None
        have, shape = spec.layout, tuple(spec.shape)
        layout = have.with_placements({a: Replicate() for a in have.shard_order[dim]})
        mapping = [None if d == dim else d - (d > dim) for d in range(len(shape))]
        output = layout.move_dims(mapping, len(shape) - 1)
        if layout is have:
            return Solution([have], [output] * shape[dim], is_view=True)

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            whole = transition(x, (have, NOT_VARYING), (layout, NOT_VARYING), shape)
            return whole.movedim(dim, 0).contiguous().unbind()  # each dense, as one that is viewed anew has to be

        return Solution([have], [output] * shape[dim], local, copies=True)
