"""``masked_scatter``: what a mask picks gets the elements of a source, in order.

Where the mask says the same of whole rows, and the source has such rows, all of this is about rows: the ranks tell each
other how many they pick, and each gets those of the source that it needs. Dims of the rows may be sharded as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel import Layout, Shard
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    LayoutOp,
    OpSummary,
    OverAxes,
    S,
    Solution,
    Spec,
    broadcast_shape,
    is_replicate,
    local_shape,
)
from hyper_parallel_ops_basic.indexing.flattened_dims import held_places
from hyper_parallel_ops_basic.indexing.mask_positions import Picked, of_dims
from hyper_parallel_ops_basic.values.factories import settled


class MaskedScatter(LayoutOp):
    """``masked_scatter(input, mask, source)``: the picked elements get those of ``source``, in order.

    The mask is laid out like the input, or the input like the mask along dims on which it is whole and not written to.
    Source and input may be sharded by the same mesh axes.
    """

    summary = OpSummary(
        "every dim of input and mask; the source over the same mesh axes, along any dim",
        communicates=(
            "1 or 2 all-gathers of counts and indices, none for dims of rows that the mask picks whole; source sharded "
            "over the same axes: 1 all-to-all of what goes to other ranks | the same"
        ),
        whole="the source over axes that shard neither input nor mask: each rank of them needs all that is picked",
    )

    signature = "input, mask, source"

    def solve(self, call: Call) -> Solution:
        spec, mask, source = call.inputs[0], call.spec("mask"), call.spec("source")
        shape = tuple(spec.shape) if call.inplace else broadcast_shape([spec.shape, mask.shape])
        target = _broadcast(settled(spec.layout), spec.shape, shape)
        if not call.inplace:
            for axis, placement in enumerate(_broadcast(mask.layout, mask.shape, shape).placements):
                if type(placement) is Shard and is_replicate(target.placements[axis]):
                    target = target.with_placements({axis: placement})
        rows = _row_dims(mask, source, shape)
        lead = len(shape) - rows
        mask_layout = of_dims(target, range(lead)).move_dims(range(lead), len(shape))
        source_layout = _source_layout(source, target, rows)
        targets = [
            _before_broadcast(target, spec.shape, shape),
            _before_broadcast(mask_layout, mask.shape, shape),
            source_layout,
        ]
        sizes = local_shape(target, shape, target.info.my_coordinate())
        picking, picks_from, first = of_dims(target, range(lead)), shape[:lead], (..., *(0,) * rows)
        take = _taking(source_layout, tuple(source.shape), rows)
        arguments, in_place = self.arguments, call.inplace

        def scatter(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            x, mask, source = given["input"], given["mask"], given["source"]
            x = x if in_place else x.expand(sizes)
            chosen = mask.expand((*sizes[:lead], *shape[lead:]))[first]
            taken = take(source, Picked(chosen, picking, picks_from))
            put = torch.Tensor.masked_scatter_ if in_place else torch.masked_scatter
            return put(x, chosen.view((*chosen.shape, *(1,) * rows)).expand(sizes), taken)

        return Solution(targets, [target], scatter, shapes=[shape])


def _broadcast(layout: Layout, own: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor of ``own`` shape, once it has ``shape``; what is repeated is whole."""
    kept, grown = _kept(own, shape)
    return of_dims(layout, kept).move_dims(grown, len(shape))


def _before_broadcast(layout: Layout, own: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    """The other way."""
    kept, grown = _kept(own, shape)
    return of_dims(layout, grown).move_dims(kept, len(own))


def _kept(own: tuple[int, ...], shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The dims that are not repeated, as of both shapes."""
    added = len(shape) - len(own)
    kept = [d for d, size in enumerate(own) if size == shape[d + added]]
    return kept, [d + added for d in kept]


def _row_dims(mask: Spec, source: Spec, shape: tuple[int, ...]) -> int:
    """How many dims, of the last ones, the source has as well, and the mask does not tell apart."""
    rows = 0
    for size, own in zip(reversed(shape), reversed(source.shape), strict=False):
        d = len(mask.shape) - rows - 1
        repeats = d < 0 or ((mask.shape[d] == 1 or mask.stride[d] == 0) and not mask.layout.shard_order[d])
        if size != own or not size or not repeats:
            break
        rows += 1
    return rows


def _source_layout(source: Spec, target: Layout, rows: int) -> Layout:
    """Along the dims of rows as the target; beyond as it is, over the axes that shard the target beyond rows."""
    lead, first = len(source.shape) - rows, target.ndim - rows
    spread = {a for axes in target.shard_order[:first] for a in axes}
    given = settled(source.layout)
    layout = of_dims(target, range(first, target.ndim)).move_dims(range(lead, source.layout.ndim), source.layout.ndim)
    for d, axes in enumerate(given.shard_order):
        for axis in axes:
            if axis in spread and lead:
                layout = layout.with_placements({axis: given.placements[axis] if d < lead else S(0)})
    return layout


def _taking(layout: Layout, shape: tuple[int, ...], rows: int) -> Callable[[torch.Tensor, Picked], torch.Tensor]:
    """Function of this rank's piece of a source, and of what is picked, that gives the rows for this rank."""
    beyond = shape[: len(shape) - rows]
    count, each = math.prod(beyond), math.prod(shape[len(beyond) :])
    over = OverAxes(layout, range(len(beyond)))

    def take(source: torch.Tensor, picked: Picked) -> torch.Tensor:
        if picked.total > count:
            raise RuntimeError(
                f"masked_scatter: expected at least {picked.total * each} elements in source, got {count * each}"
            )
        mine = source.shape
        source = source.reshape((math.prod(mine[: len(beyond)]), *mine[len(beyond) :]))
        if not over:
            return source.index_select(0, picked.places.to(source.device))
        group = layout.info.group(over.axes)
        held = [held_places(layout, beyond, 0, c) for c in group.coordinates]
        return ExchangePlan(group, held, picked.places_at(group.coordinates))(source, 0)

    return take
