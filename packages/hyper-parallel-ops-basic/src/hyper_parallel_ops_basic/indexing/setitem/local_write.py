"""What a rank does for ``x[index] = value`` on its piece."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel import Layout, Replicate
from hyper_parallel.rules import (
    NOT_VARYING,
    ExchangePlan,
    HeldIndices,
    Overlap,
    dim_intervals,
    keep_range,
    overlaps,
    transition,
)
from hyper_parallel_ops_basic.indexing.index import Index, as_ids, asked_for, check_whole_ids, dims_read
from hyper_parallel_ops_basic.indexing.sharded_masks import Beside, ShardedMask

if TYPE_CHECKING:
    from hyper_parallel_ops_basic.indexing.setitem.sent_values import Travelling


class Value:
    """What is written: a tensor, or a number (without dims).

    Attributes:
        given: the layout that a tensor has; None for a number.
        shape: its global shape.
        lies: dims of the result on which it is sharded as the target, or what is picked, is.
        moves: of those on which it is sharded otherwise: its own dim, and how it travels.
    """

    def __init__(self, index: Index, given: Layout | None = None, shape: tuple[int, ...] = ()) -> None:
        self.given, self.shape = given, shape
        self._needed = None if given is None else given.replicated()
        self._beyond = len(index.result) - len(shape)
        self.lies: set[int] = set()
        self.moves: dict[int, tuple[int, ExchangePlan]] = {}

    @property
    def layout(self) -> Layout:
        """The layout that a tensor must have; at first, whole on every rank."""
        assert self._needed is not None
        return self._needed

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._needed = layout

    def keep(self, axes: Sequence[int]) -> None:
        """It stays on these mesh axes, in this order, as it is."""
        assert self.given is not None
        for axis in axes:
            self.layout = self.layout.with_placements({axis: self.given.placements[axis]})

    def own_dim(self, at: int) -> int | None:
        """Its dim for a dim of the result; None where it has none."""
        return at - self._beyond if 0 <= at - self._beyond < len(self.shape) else None


class Writing:
    """The write of one plan.

    Args:
        index: which part of the tensor.
        target: layout of the tensor.
        value: what is written.
        mask: the mask on sharded dims, if there is one.
        beside: what goes with the index tensors beside it.
        travelling: how index tensors and values come to where they are needed.
    """

    def __init__(
        self,
        index: Index,
        target: Layout,
        value: Value,
        mask: ShardedMask | None,
        beside: Beside | None,
        travelling: Travelling | None,
    ) -> None:
        self.index = index if beside is None else beside.index
        self.target, self.value, self.mask, self.beside, self.travelling = target, value, mask, beside, travelling
        shape, here = index.shape, target.info.my_coordinate()
        held = {d: dim_intervals(target, shape, d, here) for d in range(len(shape)) if target.shard_order[d]}
        self.choices: list[list[tuple[int, Overlap]]] = []
        for dim, picked in index.ranges().items():
            if dim in held:
                found = overlaps(held[dim], picked)
                if (
                    index.result.index(dim) in value.lies
                    and (kept := keep_range(target, shape, dim, picked)) is not None
                ):
                    found = [Overlap(kept.local, slice(0, len(picked)))]
                elif index.result.index(dim) in value.moves:
                    ends = itertools.accumulate(o.result.stop - o.result.start for o in found)
                    starts = itertools.chain([0], ends)
                    found = [
                        Overlap(o.local, slice(start, start + o.result.stop - o.result.start))
                        for o, start in zip(found, starts, strict=False)
                    ]
                self.choices.append([(dim, overlap) for overlap in found])
        self.looked_up = {
            i.dim: HeldIndices(target, shape, i.dim) for i in [*index.ints(), *self.index.tensors()] if i.dim in held
        }

    def __call__(self, x: torch.Tensor, given: Sequence[Any], value: Any, accumulate: bool) -> torch.Tensor:
        mine, chosen = True, None
        for own, move in self.value.moves.values():
            value = move(value, own)
        if self.mask is not None:
            given, value, mine = self._by_mask(self.mask, x, given, value)
        elif self.beside is not None:
            given = self.beside.whole_parts(given, x.device)
        parts = [asked_for(item, self.index.shape, given) for item in self.index.items]
        mine = self._by_ints(parts) and mine
        if self.choices or self.looked_up:
            # A rank that writes nothing says no less than the others what is wrong.
            check_whole_ids(self.index, parts, self.looked_up)
        if mine and any(i.dim in self.looked_up for i in self.index.tensors()):
            if self.travelling is not None:
                value = self.travelling.arrived(parts, self.value, value)
            chosen = self._by_tensors(x, parts)
        blocks = list(itertools.product(*self.choices)) if mine else []
        if not blocks:
            _stay_connected(x, value)
        for block in blocks:
            where = self._of_block(parts, dict(block))
            piece = self._piece(value, [(self.index.result.index(d), o.result) for d, o in block], chosen)
            if accumulate:
                _add(x, where, piece)
            else:
                x[tuple(where)] = piece
        return x

    def _by_ints(self, parts: list[Any]) -> bool:
        """Turns the ints of sharded dims, in ``parts``, into local positions; whether this rank holds all of them."""
        mine = True
        for at, item in enumerate(self.index.items):
            if item.kind == "int" and item.dim in self.looked_up:
                position = self.looked_up[item.dim].position(parts[at])
                mine, parts[at] = mine and position is not None, position or 0
        return mine

    def _of_block(self, parts: Sequence[Any], block: Mapping[int, Overlap]) -> list[Any]:
        """The parts of the index, with the local ranges of one block (by dim) in the place of ranges."""
        is_cut = [item.kind == "range" and item.dim in block for item in self.index.items]
        return [
            block[item.dim].local if cut else part
            for part, item, cut in zip(parts, self.index.items, is_cut, strict=True)
        ]

    def _by_tensors(self, x: torch.Tensor, parts: list[Any]) -> torch.Tensor:
        """Leaves, in ``parts``, the elements of the index tensors that this rank holds; returns which these are."""
        indices = [(at, i) for at, i in enumerate(self.index.items) if i.kind in ("tensor", "column")]
        mine: torch.Tensor | None = None
        found = []
        for at, item in indices:
            ids = as_ids(parts[at], x.device)
            held = self.looked_up.get(item.dim)
            if held is not None:
                ids, here = held.find(torch.where(ids < 0, ids + held.size, ids))
                mine = here if mine is None else torch.logical_and(mine, here)
            found.append(ids)
        assert mine is not None
        *found, chosen = torch.broadcast_tensors(*found, mine)
        for (at, _), ids in zip(indices, found, strict=True):
            parts[at] = ids[chosen]
        return chosen

    def _by_mask(
        self, mask: ShardedMask, x: torch.Tensor, given: Sequence[Any], value: Any
    ) -> tuple[Sequence[Any], Any, bool]:
        """The parts of the index and the values for this rank's part of the mask, and whether there are any."""
        parts = list(given)
        here = parts[mask.item.where or 0] = mask.here(given, x.device)
        at, is_one = self.index.picked, False
        own = self.value.own_dim(at)
        goes_along = own is not None and self.value.shape[own] != 1
        if not goes_along and self.beside is None:
            return parts, value, True
        picked = mask.picked(here)
        if self.beside is not None:
            parts, is_one = self.beside.parts(parts, here, picked)
        if not goes_along or own is None:
            return parts, value, bool(here.any()) or not is_one
        if is_one:  # all values go to one place
            if at in self.value.lies:
                value = self._gathered(value, picked.over.axes)
            return parts, value, bool(here.any())
        if self.value.shape[own] != picked.total:
            raise RuntimeError(
                f"shape mismatch: {self.value.shape[own]} values for {picked.total} elements that the mask picks"
            )
        return parts, picked.of_this_rank(value, own, at in self.value.lies), True

    def _gathered(self, value: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        have = self.value.layout
        whole = have.with_placements(dict.fromkeys(axes, Replicate()))
        return transition(value, (have, NOT_VARYING), (whole, frozenset(axes)), self.value.shape)

    def _piece(self, value: Any, cuts: list[tuple[int, slice]], chosen: torch.Tensor | None) -> Any:
        """The part of the value that goes to this rank."""
        if not isinstance(value, torch.Tensor):
            return value
        for at, cut in cuts:
            own = self.value.own_dim(at)
            if own is not None and self.value.shape[own] != 1 and at not in self.value.lies:
                value = value.narrow(own, cut.start, cut.stop - cut.start)
        if chosen is None or not value.ndim:
            return value
        # The dims that the index tensors make become one, of those elements that are here.
        added = len(self.index.result) - value.ndim
        first, count = self.index.gathered.start - added, chosen.ndim
        last = first + count
        if last <= 0:
            return value
        sizes = list(value.shape)
        sizes[max(first, 0) : last] = chosen.shape
        value = value.expand(sizes) if first >= 0 else value.expand(*chosen.shape, *value.shape[last:])
        first = max(first, 0)
        rows = value.movedim(list(range(first, first + count)), list(range(count)))[chosen]
        return rows.movedim(0, first)


def _add(x: torch.Tensor, where: Sequence[Any], value: Any) -> None:
    """``x[where] += value`` with repeated indices added each time; ``where`` holds slices and index tensors."""
    cuts = [[part] if isinstance(part, slice) else [slice(None)] * dims_read(part) for part in where]
    region = x[tuple(cut for some in cuts for cut in some)]
    indices = [None if isinstance(part, slice) else torch.as_tensor(part, device=x.device) for part in where]
    while indices and indices[-1] is None:
        indices.pop()
    value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    region.index_put_(tuple(indices), value, accumulate=True)


def _stay_connected(x: torch.Tensor, value: Any) -> None:
    """A rank that writes nothing still takes part in the backward pass, whose collectives need all ranks."""
    if isinstance(value, torch.Tensor) and value.requires_grad and x.ndim:
        x.narrow(0, 0, 0).copy_(value.reshape(-1)[:1].sum())
