"""Global indices of a sharded dimension on the rank that holds only some of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyper_parallel import torch_compat
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial
from hyper_parallel.sharding.shard_ranges import Intervals, dim_intervals


class HeldIndices:
    """The part of one dimension that this rank holds.

    Args:
        layout: of the tensor that is indexed.
        shape: its global shape.
        dim: the dimension that the indices mean.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...], dim: int) -> None:
        self.dim, self.size = dim, shape[dim]
        self.intervals = dim_intervals(layout, shape, dim, layout.info.my_coordinate())

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in the local tensor, and which of them mean anything: the others are held elsewhere.

        Raises:
            IndexError: when an index is held nowhere (on accelerators an assertion of the device, as in PyTorch).
        """
        check_in_range(index, self.size)
        return locate(index, self.intervals)

    def position(self, index: int) -> int | None:
        """Local position of one index; None when another rank holds it."""
        offset = 0
        for start, stop in self.intervals:
            if start <= index < stop:
                return index - start + offset
            offset += stop - start
        return None

    def read(
        self, x: torch.Tensor, index: torch.Tensor, take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``take(x, positions)`` with harmless positions where another rank holds the index, and which are held.

        Every rank computes on its piece, an empty one too, so that all take part in the backward pass.
        """
        positions, held = self.find(index)
        if x.shape[self.dim] == 0:
            x = one_row_more(x, self.dim)
        return take(x, positions), held

    def select(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """``index_select`` of the whole tensor, with zeros in the place of what other ranks hold.

        Args:
            x: this rank's piece.
            index: of no negative numbers.
        """
        out, held = self.read(x, index.reshape(-1), lambda piece, positions: piece.index_select(self.dim, positions))
        return out.masked_fill(~held.view([-1 if d == self.dim else 1 for d in range(out.ndim)]), 0)

    def write(
        self, x: torch.Tensor, index: torch.Tensor, put: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """``put(x, positions)`` on the piece with one row more, which takes what belongs to other ranks."""
        positions, held = self.find(index)
        size = x.shape[self.dim]
        positions = positions.masked_fill(~held, size)
        return put(one_row_more(x, self.dim), positions).narrow(self.dim, 0, size)


def check_in_range(index: torch.Tensor, size: int) -> None:
    """Whether indices, of no negative numbers, are below ``size``.

    Raises:
        IndexError: when not (on accelerators an assertion of the device, as in PyTorch).
    """
    inside = ((index >= 0) & (index < size)).all()
    if index.device.type != "cpu":
        torch_compat.assert_async(inside)
    elif not inside:
        raise IndexError(f"index out of range: between {int(index.min())} and {int(index.max())}, size {size}")


def locate(index: torch.Tensor, held: Intervals) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each global index among those of the intervals (0 where it is in none), and whether it is in one."""
    positions, here = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    offset = 0
    for start, stop in held:
        inside = (index >= start) & (index < stop)
        positions = torch.where(inside, index - (start - offset), positions)
        here = here | inside
        offset += stop - start
    return positions, here


def one_row_more(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` with a row of zeros at the end of ``dim``."""
    # Not by cat, whose gradient leaves out an empty part of one dim: all ranks have to go on from there.
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, 1])


def pending_lookup(dtype: torch.dtype) -> Partial:
    """What is pending when the rank that holds an element has its value, and the others have zeros (False)."""
    return Partial("max") if dtype is torch.bool else Partial()
