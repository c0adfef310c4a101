"""Columns of an image whose positions are sharded: every rank fetches the block of the image that its columns show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import Layout, PackedShard, Shard
from hyper_parallel.rules import NOTHING, ExchangePlan, dim_intervals, indices_of
from hyper_parallel_ops_basic.indexing.flattened_dims import held_places
from hyper_parallel_ops_basic.spatial.halo import Window

__all__ = ["Patches", "in_every_row"]


def in_every_row(dim: int, counts: Sequence[int]) -> Shard:
    """A chunk of each row of columns along ``dim``, of so many rows and columns in each."""
    rows, columns = counts
    return PackedShard(dim, (columns,) * rows) if rows > 1 else Shard(dim)


class Patches:
    """``F.unfold`` on one rank, where it has whole channels. The block is the smallest one that has all its columns.

    Args:
        windows: what a column shows, for each position dim.
        image: layout and global shape.
        columns: those of the result, whose last dim is laid out here.

    Attributes:
        output: layout of the result. Of a sharded height every rank has a chunk of all columns, of a sharded width a
            chunk of each row of them.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        image: tuple[Layout, tuple[int, ...]],
        columns: tuple[Layout, tuple[int, ...]],
    ) -> None:
        (layout, shape), (output, result) = image, columns
        self.windows, self.sizes, self.first = windows, shape[-2:], len(shape) - 2
        self.counts = [w.count(n) for w, n in zip(windows, self.sizes, strict=True)]
        self.output = self._laid_out(layout, output)
        group = layout.info.group(tuple(sorted(a for axes in layout.shard_order[-2:] for a in axes)))
        held, blocks = [], []
        for c in group.coordinates:
            held.append(held_places(layout, shape, self.first, c))
            blocks.append(self._block(indices_of(dim_intervals(self.output, result, len(result) - 1, c))))
        self.move = ExchangePlan(group, held, [positions.flatten() for positions, _ in blocks])
        positions, self.places = blocks[group.rank]
        self.block = positions.shape
        self.stays = not self.move.communicates and torch.equal(held[group.rank], positions.flatten())

    def _laid_out(self, image: Layout, columns: Layout) -> Layout:
        (height, width), last = image.shard_order[-2:], columns.ndim - 1
        placed: dict[int, Shard] = {a: Shard(last) for a in (*width, *height)}
        if width:
            placed[width[0]] = in_every_row(last, self.counts)
        placements = tuple(placed.get(a, p) for a, p in enumerate(columns.placements))
        return columns.with_order(placements, (*columns.shard_order[:-1], (*width, *height)))

    def _block(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of the block that has these columns, and their places among all columns that it has."""
        if not len(columns):
            return columns.view(0, 0), columns
        down, along = columns // self.counts[1], columns % self.counts[1]
        spans = [(int(n.min()), int(n.max()) + 1) for n in (down, along)]
        read = [w.under(*span, size) for w, span, size in zip(self.windows, spans, self.sizes, strict=True)]
        rows, across = read[0].unsqueeze(1), read[1]
        positions = torch.where((rows >= 0) & (across >= 0), rows * self.sizes[1] + across, NOTHING)
        (top, _), (left, right) = spans
        return positions, (down - top) * (right - left) + along - left

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        """The block, padding included, from this rank's piece of the image; one all-to-all where that is not enough."""
        if self.stays:
            return x
        return self.move(x.flatten(self.first), self.first).unflatten(self.first, self.block)

    def columns(self, block: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """This rank's columns, from a block that is not empty."""
        kernel, stride, dilation = zip(*((w.kernel, w.stride, w.dilation) for w in self.windows), strict=True)
        out = F.unfold(block, kernel, dilation, 0, stride)
        return out if out.shape[-1] == len(self.places) else out.index_select(-1, self.places.to(out.device))
