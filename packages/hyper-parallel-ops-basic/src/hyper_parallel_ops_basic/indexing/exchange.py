"""Elements that travel by index, where the indexed dimension and the index are sharded by the same mesh axes.

The ranks tell each other their indices (one all-gather of integers); then what another rank has asked for, or what it
is to hold, travels once (one all-to-all, and the transpose of it backward).
"""

from __future__ import annotations

import math

import torch

from hyper_parallel import Layout, Placement, Shard
from hyper_parallel.rules import ExchangePlan, S, Spec, dim_intervals, indices_of, local_shape, on_dim, primitives

__all__ = ["IndexExchange", "placed_along"]


class IndexExchange:
    """The ranks among which a dimension and an index into it are spread.

    False when no mesh axis shards both.

    Args:
        layout: of the tensor that is indexed.
        shape: its global shape.
        dim: the dimension that the indices mean.
        index_layout, index_shape: of the index, of which one dim is sharded by axes that shard ``dim``.
    """

    def __init__(
        self, layout: Layout, shape: tuple[int, ...], dim: int, index_layout: Layout, index_shape: tuple[int, ...]
    ) -> None:
        self.dim, self.size = dim, shape[dim]
        by_index = {a for order in index_layout.shard_order for a in order}
        shared = sorted(by_index.intersection(layout.shard_order[dim]))
        self.axes = tuple(a for a in shared if layout.mesh_shape[a] > 1)
        if not self.axes:
            return
        self._group = layout.info.group(self.axes)
        self._held = [indices_of(dim_intervals(layout, shape, dim, c)) for c in self._group.coordinates]
        self._pieces = [local_shape(index_layout, index_shape, c) for c in self._group.coordinates]
        self._spread_dims = {d for d, order in enumerate(index_layout.shard_order) if {*order} & {*self.axes}}
        self._index_parts = [
            [indices_of(dim_intervals(index_layout, index_shape, d, c)) for c in self._group.coordinates]
            for d in range(len(index_shape))
        ]

    def __bool__(self) -> bool:
        return bool(self.axes)

    def read(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of ``x`` (the piece of this rank) that ``index`` (of no negative numbers) asks for.

        Rows that no rank of the group holds are zeros.

        Returns:
            The rows along ``dim``, for each element of ``index`` its position among them, and the rows' numbers.

        Raises:
            IndexError: when an index of any rank is out of range.
        """
        wanted = [part.unique() for part in self._told(index, self.size)]
        rows = ExchangePlan(self._group, self._held, wanted)(x, self.dim)
        mine = wanted[self._group.rank].to(index.device)
        return rows, torch.searchsorted(mine, index.contiguous()), mine

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._group.rank

    def told(self, index: torch.Tensor, size: int | None = None, index_dim: int = 0) -> torch.Tensor:
        """What the group holds of the index, in order along ``index_dim``, on the CPU; one all-gather.

        Args:
            index: this rank's piece, of no negative numbers.
            size: what its numbers must be below; by default the size of ``dim``.

        Raises:
            IndexError: when an index of any rank is out of range.
        """
        parts = self._told(index, self.size if size is None else size)
        return torch.cat(parts, index_dim).index_select(index_dim, torch.cat(self._spots(index_dim)).argsort())

    def needed(self, whole: torch.Tensor, index_dim: int) -> list[torch.Tensor]:
        """Per member of the group, the numbers of the slices of ``whole`` of which an element lies in its piece."""
        owner = torch.full((self.size,), -1)
        for member, held in enumerate(self._held):
            owner[held] = member
        count = whole.shape[index_dim]
        owners = owner[whole].movedim(index_dim, 0).reshape(count, whole.numel() // max(count, 1))
        return [(owners == member).any(1).nonzero().squeeze(1) for member in range(self._group.size)]

    def bring(self, values: torch.Tensor, dim: int, index_dim: int, needed: list[torch.Tensor]) -> torch.Tensor:
        """The needed slices of values that lie along ``dim`` as the index does along ``index_dim``; one all-to-all."""
        return ExchangePlan(self._group, self._spots(index_dim), needed)(values, dim)

    def _spots(self, index_dim: int) -> list[torch.Tensor]:
        """Per member, the places of its part among all that the group holds of the index."""
        parts = self._index_parts[index_dim]
        known = torch.cat(parts).sort().values
        return [torch.searchsorted(known, part) for part in parts]

    def _told(self, index: torch.Tensor, size: int) -> list[torch.Tensor]:
        """The index pieces of all members, on the CPU."""
        # Along other dims they have as much of it as this one, which may be less than their layout says.
        pieces = [
            tuple(piece[d] if d in self._spread_dims else size for d, size in enumerate(index.shape))
            for piece in self._pieces
        ]
        counts = [math.prod(piece) for piece in pieces]
        longest = max(counts)
        padded = index.new_zeros(longest)
        padded[: index.numel()] = index.reshape(-1)
        known = index.new_empty(longest * len(counts))
        if longest:
            primitives.all_gather(known, padded, self._group)
        rows = known.cpu().view(len(counts), longest)
        parts = [row[:n].view(piece).long() for row, n, piece in zip(rows, counts, pieces, strict=True)]
        for part in parts:
            if part.numel() and not 0 <= int(part.min()) <= int(part.max()) < size:
                raise IndexError(f"index out of range: between {int(part.min())} and {int(part.max())}, size {size}")
        return parts


def placed_along(spec: Spec, dim: int) -> list[Placement]:
    """How an input is sharded along a dim, a packed placement first; plainly where it is not sharded at all.

    For rows in which index and indexed dim are sharded together: they have other sizes and so other sections, of which
    each must be named.
    """
    found = {on_dim(p, dim) for p in spec.layout.placements if isinstance(p, Shard) and p.dim == dim}
    return sorted(found, key=lambda p: type(p) is Shard) or [S(dim)]
