"""Collectives for the inside of an operator's local function: over the mesh axes that shard some dimensions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hyper_parallel._rules.families.exchange import indices_of
from hyper_parallel.comm.redistribute import transition
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial, Replicate, Shard
from hyper_parallel.sharding.shard_ranges import dim_intervals
from hyper_parallel.sharding.spec import NOT_VARYING

__all__ = ["OverAxes"]


class OverAxes:
    """The mesh axes that shard ``dims`` of tensors laid out as ``layout``, and what can be reduced over them.

    The tensors that travel are whole on each rank (statistics, counts), of any shape that the ranks of the axes share.
    False when there are no such axes: then nothing has to be communicated.
    """

    def __init__(self, layout: Layout, dims: Iterable[int]) -> None:
        self.layout = layout
        found = {a for d in dims for a in layout.shard_order[d]}
        self.axes = tuple(sorted(a for a in found if layout.mesh_shape[a] > 1))
        self._whole = layout.replicated(0)
        self._pending = self._whole.with_placements(dict.fromkeys(self.axes, Partial()))

    def __bool__(self) -> bool:
        return bool(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks that hold a part."""
        return self.layout.info.group(self.axes).size if self.axes else 1

    def sum(self, x: torch.Tensor, varying: bool = False) -> torch.Tensor:
        """The sum over the ranks, differentiable; one all-reduce.

        Args:
            x: this rank's term.
            varying: whether the result meets sharded data again, so that its gradient arrives in terms (one all-reduce
                backward). Otherwise every rank does the same with it, and the backward is free.
        """
        if not self.axes:
            return x
        target = frozenset(self.axes) if varying else NOT_VARYING
        return transition(x, (self._pending, NOT_VARYING), (self._whole, target), ())

    def vary(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, equal on all ranks, for use with sharded data: identity, with an all-reduce in backward."""
        if not self.axes:
            return x
        return transition(x, (self._whole, NOT_VARYING), (self._whole, frozenset(self.axes)), ())

    def settle(self, x: torch.Tensor) -> torch.Tensor:
        """A varying ``x``, used on, from here, by all ranks alike: a copy; its gradient counts once."""
        if not self.axes:
            return x
        # As the view that a Function returns cannot be written to.
        return transition(x, (self._whole, frozenset(self.axes)), (self._whole, NOT_VARYING), ()).clone()

    def extreme(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """The ``"max"`` or ``"min"`` over the ranks, NaN included; no gradient. One all-reduce."""
        x = x.detach()
        if not self.axes:
            return x
        pending = self._whole.with_placements(dict.fromkeys(self.axes, Partial(op)))
        return transition(x, (pending, NOT_VARYING), (self._whole, NOT_VARYING), ())

    def gather(self, x: torch.Tensor, varying: bool = False) -> torch.Tensor:
        """The ranks' tensors stacked along a new dim 0, by mesh coordinate; differentiable. One all-gather.

        Args:
            x: this rank's tensor; the ranks' have the same shape.
            varying: as in :meth:`sum`; the backward is then a reduce-scatter.
        """
        if not self.axes:
            return x.unsqueeze(0)
        order = (self.axes, *((),) * x.ndim)
        placements = tuple(Shard(0) if a in self.axes else Replicate() for a in range(self.layout.info.ndim))
        stacked = self._whole.with_order(placements, order)
        target = frozenset(self.axes) if varying else NOT_VARYING
        whole = stacked.replicated()
        return transition(x.unsqueeze(0), (stacked, NOT_VARYING), (whole, target), (self.size, *x.shape))


def global_indices(layout: Layout, shape: tuple[int, ...], dim: int, device: torch.device) -> torch.Tensor:
    """Global index, along ``dim``, of every element that this rank holds: int64 of the local length."""
    return indices_of(dim_intervals(layout, shape, dim, layout.info.my_coordinate()), device)
