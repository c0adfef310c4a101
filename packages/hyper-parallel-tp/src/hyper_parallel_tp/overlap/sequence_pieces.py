"""A sequence that ranks share, moved in pieces: each piece has a part of every rank's shard."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from hyper_parallel import Layout, Partial
from hyper_parallel.rules import Pending, chunk_bounds, describe, described, is_tracing, plan_transition

__all__ = ["SequencePieces"]


class SequencePieces:
    """How the dim ``dim`` of a tensor, sharded over one mesh axis, is cut.

    Rank r's part of a piece follows that of rank r - 1; where shards are uneven the parts are filled up to the same
    length.

    Args:
        whole, sharded: the tensor's layout with the axis Replicate, and with it Shard(dim).
        dim, axis: the dim, and the mesh axis.
        shape: global shape of the tensor that travels.
        pieces: number of pieces wanted; there are fewer when the shards are shorter.
    """

    def __init__(
        self, whole: Layout, sharded: Layout, dim: int, axis: int, shape: tuple[int, ...], pieces: int
    ) -> None:
        if pieces < 1:
            raise ValueError(f"a sequence is cut into one or more pieces, got pieces={pieces}")
        self.whole, self.sharded, self.dim, self.shape = whole, sharded, dim, shape
        self.pending = whole.with_placements({axis: Partial()})
        self.ranks, self.me = whole.mesh_shape[axis], whole.info.my_coordinate()[axis]
        self.bounds = [chunk_bounds(shape[dim], self.ranks, rank) for rank in range(self.ranks)]
        widest = self.bounds[0][1]
        self.step = max(-(-widest // pieces), 1)
        self.count = max(-(-widest // self.step), 1)
        self.widest = widest

    # -- moving ---------------------------------------------------------------------------------------------------

    def gather(self, shard: torch.Tensor, piece: int) -> PieceInFlight:
        """Begin to gather a piece of the ranks' shards."""
        start, width = piece * self.step, self._width(piece)
        part = shard.narrow(self.dim, min(start, shard.shape[self.dim]), self._rows(self.me, piece))
        return self._start(self.sharded, self.whole, _filled(part, self.dim, width), width)

    def scatter(self, terms: torch.Tensor, piece: int) -> PieceInFlight:
        """Begin to sum the ranks' terms of a piece; each rank gets the part of its own shard."""
        return self._start(self.pending, self.sharded, terms, self._width(piece))

    def _start(self, src: Layout, dst: Layout, local: torch.Tensor, width: int) -> PieceInFlight:
        shape = list(self.shape)
        shape[self.dim] = self.ranks * width
        told = (
            described(f"{describe(src)} -> {describe(dst)}", mesh_axes=src.mesh_dim_names)
            if is_tracing()
            else nullcontext()
        )
        with told:
            return PieceInFlight(plan_transition(src, dst, tuple(shape)).start(local))

    # -- cutting and joining --------------------------------------------------------------------------------------

    def take(self, whole: torch.Tensor, piece: int) -> torch.Tensor:
        """A piece of a tensor that has the whole sequence."""
        width = self._width(piece)
        if self.ranks * self.widest == self.shape[self.dim]:
            ranks = whole.unflatten(self.dim, (self.ranks, self.widest))
            return ranks.narrow(self.dim + 1, piece * self.step, width).flatten(self.dim, self.dim + 1)
        parts = [whole.narrow(self.dim, *self._place(rank, piece)) for rank in range(self.ranks)]
        return torch.cat([_filled(part, self.dim, width) for part in parts], self.dim)

    def put(self, whole: torch.Tensor, piece: int, rows: torch.Tensor) -> None:
        """Write a piece to its places in the whole sequence."""
        width = self._width(piece)
        for rank in range(self.ranks):
            start, length = self._place(rank, piece)
            whole.narrow(self.dim, start, length).copy_(rows.narrow(self.dim, rank * width, length))

    def joined(self, leaving: Sequence[PieceInFlight]) -> torch.Tensor:
        """This rank's shard from what it got of every piece."""
        parts = [m.wait().narrow(self.dim, 0, self._rows(self.me, piece)) for piece, m in enumerate(leaving)]
        return torch.cat(parts, self.dim)

    def whole_shape(self, shard: Sequence[int]) -> tuple[int, ...]:
        """Shape of a local tensor with the whole sequence, from that of one with this rank's shard."""
        return (*shard[: self.dim], self.shape[self.dim], *shard[self.dim + 1 :])

    def _width(self, piece: int) -> int:
        return min(self.step, self.widest - piece * self.step)

    def _rows(self, rank: int, piece: int) -> int:
        return self._place(rank, piece)[1]

    def _place(self, rank: int, piece: int) -> tuple[int, int]:
        """Start in the whole sequence and length of a rank's part of a piece."""
        start, stop = self.bounds[rank]
        first = min(start + piece * self.step, stop)
        return first, min(first + self.step, stop) - first


class PieceInFlight:
    """A piece on its way."""

    def __init__(self, moving: Pending | torch.Tensor) -> None:
        self.moving = moving

    def wait(self) -> torch.Tensor:
        """The piece, when it has arrived."""
        if isinstance(self.moving, torch.Tensor):
            return self.moving
        self.moving.wait()
        return self.moving.out


def _filled(part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Zeros added at the end of a dim."""
    missing = length - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)
