"""The elements that a mask picks: how many there are, and where, only the data tells, and it tells all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Placement, Replicate, Shard
from hyper_parallel.rules import (
    ExchangePlan,
    OverAxes,
    contiguous_stride,
    dim_intervals,
    global_indices,
    indices_of,
    make_spec,
    on_dim,
    wrap,
)


class Picked:
    """What a sharded mask picks, in the order of the whole mask.

    Costs one all-gather of the ranks' counts; where the ranks' elements interleave (not only the first dim is sharded)
    a second one of their indices.

    Args:
        mask: this rank's part.
        layout: of the whole mask; no pending axes.
        shape: of the whole mask.

    Attributes:
        total: number of picked elements.
        places: for this rank's picked elements, in its own order, their positions among all.
    """

    def __init__(self, mask: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
        self.layout = layout
        self.over = over = OverAxes(layout, range(len(shape)))
        mine = mask.nonzero()
        if not over:
            self.total = len(mine)
            self.places = torch.arange(len(mine))
            return
        counts = [int(n) for n in over.gather(torch.tensor([len(mine)], device=mask.device))]
        self.total = sum(counts)
        group = layout.info.group(over.axes)
        # OverAxes.gather orders by coordinate, the group by its ranks.
        order = [sorted(group.coordinates).index(c) for c in group.coordinates]
        if _in_sequence(layout, shape, over):
            ends = torch.tensor(counts).cumsum(0)
            by_coordinate = [torch.arange(int(end) - n, int(end)) for end, n in zip(ends, counts, strict=True)]
        else:
            flat = torch.zeros(len(mine), dtype=torch.int64, device=mask.device)
            for d, size in enumerate(shape):
                flat = flat * size + global_indices(layout, shape, d, mask.device)[mine[:, d]]
            padded = flat.new_full((max(counts),), math.prod(shape))
            padded[: len(flat)] = flat
            known = over.gather(padded).cpu()
            ranked = torch.empty(known.numel(), dtype=torch.int64)
            ranked[known.flatten().argsort()] = torch.arange(known.numel())
            by_coordinate = [row[:n] for row, n in zip(ranked.view(known.shape), counts, strict=True)]
        self._held = [by_coordinate[i] for i in order]
        chunks = self.layout_of(layout.replicated(1), 1, 0)
        self._chunks = [indices_of(dim_intervals(chunks, (self.total,), 0, c)) for c in group.coordinates]
        self._group = group
        self.places = self._held[group.rank]

    def spread(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's picked elements, along ``dim``, to the equal chunks of :meth:`layout_of`; one all-to-all."""
        return ExchangePlan(self._group, self._held, self._chunks)(rows, dim) if self.over else rows

    def collect(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """The other way: of a tensor with an element for each picked one along ``dim``, in equal chunks, those of this
        rank; one all-to-all."""
        return ExchangePlan(self._group, self._chunks, self._held)(rows, dim) if self.over else rows

    def places_at(self, coordinates: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """:attr:`places` of the ranks at these mesh coordinates, of this rank's group."""
        at = self._group.coordinates
        return [self._held[at.index(coordinate)] for coordinate in coordinates]

    def of_this_rank(self, rows: torch.Tensor, dim: int, is_spread: bool) -> torch.Tensor:
        """Of a tensor with an element for each picked one along ``dim``, those of this rank's elements.

        Args:
            rows: whole along ``dim``, or this rank's chunk.
            is_spread: whether the ranks have equal chunks of it, as :meth:`layout_of` says; costs 1 all-to-all.
        """
        return self.collect(rows, dim) if is_spread else rows.index_select(dim, self.places.to(rows.device))

    def layout_of(self, base: Layout, ndim: int, dim: int) -> Layout:
        """``base`` (for ``ndim`` dims) with the picked elements along ``dim`` in equal chunks."""
        # Axes of one rank shard nothing, and are none of those that the chunks are over.
        freed = base.shard_order[dim] if dim < base.ndim else ()
        rest = [Replicate() if a in freed else p for a, p in enumerate(base.placements)]
        placements = tuple(Shard(dim) if a in self.over.axes else p for a, p in enumerate(rest))
        order = tuple(self.over.axes if d == dim else axes for d, axes in enumerate(base.shard_order))
        return base.with_order(placements, (order + ((),) * ndim)[:ndim])


def by_data(*args: Any, **kwargs: Any) -> None:
    """What a call whose results only the data tells gives on meta tensors."""


def known(
    local: torch.Tensor, layout: Layout, shape: Sequence[int], stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A result whose global shape the data told, contiguous where no stride is given."""
    return wrap(local, make_spec(layout, tuple(shape), stride or contiguous_stride(shape), local.dtype))


def of_dims(layout: Layout, dims: Sequence[int]) -> Layout:
    """Layout of a tensor over some of the dims, laid out as these are and Replicate beyond."""
    mapping = {d: i for i, d in enumerate(dims)}
    placements: dict[int, Placement] = {
        a: on_dim(layout.placements[a], mapping[d]) for d in dims for a in layout.shard_order[d]
    }
    order = tuple(layout.shard_order[d] for d in dims)
    return layout.with_order(tuple(placements.get(a, Replicate()) for a in range(len(layout.placements))), order)


def _in_sequence(layout: Layout, shape: Sequence[int], over: OverAxes) -> bool:
    """Whether each rank's elements come, in the order of the whole, before those of the next."""
    first = next((d for d, n in enumerate(shape) if n != 1), 0)
    axes = layout.shard_order[first]
    plain = all(type(layout.placements[a]) is Shard for a in axes)
    return plain and set(over.axes) <= set(axes) and list(axes) == sorted(axes)
