"""``x[index] = value``, ``index_put_``: every rank writes what it holds of the picked region.

The target keeps its layout. Slices and ints may run over sharded dimensions, at any position; of index tensors and
masks every rank takes what falls into its piece, and of the values what belongs to that. Index tensors that are sharded
by the mesh axes of the dimension stay so: what concerns other ranks travels there (:mod:`.exchanging`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.boxes import dim_intervals
from hyper_parallel.call import Call, Ref, Solution, refuse
from hyper_parallel.families.held_indices import HeldIndices
from hyper_parallel.families.moving import Move, indices_of
from hyper_parallel.families.over_axes import OverAxes
from hyper_parallel.families.ranges import Overlap, keep_range, overlaps
from hyper_parallel.layout import Layout
from hyper_parallel.op import OpSummary
from hyper_parallel.placements import Partial, Replicate, Shard, on_dim
from hyper_parallel.strategy import LayoutOp, S
from hyper_parallel.transition import plan_transition

from .exchanging import Exchange
from .index_arguments import Index, Item
from .indexing import local_piece, of_dims
from .picking import Picked


class SetItem(LayoutOp):
    """``x[index] = value``; ``index_put(indices, values, accumulate)`` is the same with tensors only."""

    summary = OpSummary(
        "every dim of the target; the values are sharded by its axes, lie like what the mask picks, or are whole",
        pending="stays, with pending values",
        communicates=(
            "values that do not lie where they go: 1 all-to-all | the same; mask with values: 1 or 2 all-gathers of "
            "counts and indices (and 1 all-to-all of sharded values); index "
            "tensors sharded as their dim: 1 all-gather of each (and 1 all-to-all of sharded values)"
        ),
        whole="values that lie otherwise",
    )

    signature = "input, indices, values, accumulate=False"

    def solve(self, call: Call) -> Solution:
        target = call.inputs[0].layout
        shape = tuple(call.inputs[0].shape)
        by_tensors = call.name != "__setitem__"  # index_put takes a list of tensors
        given = call.arg("indices")
        index = Index(tuple(given) if by_tensors else given, shape)
        value = call.arg("values")
        targets = [spec.layout.replicated() for spec in call.inputs]
        targets[0] = target
        same: set[int] = set()  # dims of the result on which a sharded value lies as the target or what is picked does
        moves: dict[int, tuple[int, Move]] = {}  # of those on which it is spread otherwise: its dim, how it travels
        mask = index.mask
        if mask is not None and any(target.shard_order[d] for d in index.gathered_dims()):
            if sum(i.kind in ("tensor", "mask") for i in index.items) > 1:
                raise refuse(
                    call,
                    "a mask on a sharded dimension is mixed with other index tensors",
                    "use mask.nonzero() in its place, or redistribute the target first",
                )
        if mask is not None and mask.ref is not None:
            targets[mask.ref.index] = of_dims(target, range(mask.dim, mask.dim + len(mask.value)))
        if isinstance(value, Ref):
            targets[value.index], same, moves = self._value_layout(call, index, value, target)
        spread = _spread_with(call, index, target)
        travelling = None
        if spread is not None:
            for item in index.tensors():
                assert item.ref is not None
                targets[item.ref.index] = item.ref.spec.layout
            if isinstance(value, Ref):
                targets[value.index], own = _spread_values(call, index, value, targets[value.index], spread)
                if own is not None:
                    same.add(index.gathered or 0)
            layout = targets[spread.ref.index]  # type: ignore[union-attr]
            travelling = Exchange(target, shape, spread.dim, layout, spread.value)
        _check(call, targets)
        write = _Writing(index, target, shape, same, moves, travelling or None)
        in_place, neutral = call.inplace, neutral_of_number(target)

        def local(x: torch.Tensor, given: Any, value: Any, accumulate: bool = False) -> torch.Tensor:
            given = tuple(given) if isinstance(given, tuple) or by_tensors else (given,)
            if neutral is not None and not isinstance(value, torch.Tensor):
                value = neutral
            return write(x if in_place else x.clone(), given, value, accumulate)

        return Solution(targets, [target], _with_names(local), meta=lambda x, *args, **kwargs: x)

    @staticmethod
    def _value_layout(
        call: Call, index: Index, value: Ref, target: Layout
    ) -> tuple[Layout, set[int], dict[int, tuple[int, Move]]]:
        """Layout that the value must have: pending where the target is, sharded by the target's axes where it is."""
        have = value.spec.layout
        layout = have.replicated().with_placements(
            {a: p for a, p in enumerate(target.placements) if isinstance(p, Partial)}
        )
        same: set[int] = set()
        moves: dict[int, tuple[int, Move]] = {}
        shape = tuple(call.inputs[0].shape)
        for dim, picked in index.ranges().items():
            axes = target.shard_order[dim]
            if not axes:
                continue
            at = index.result.index(dim)
            own = at - (len(index.result) - len(value.shape))
            if own < 0 or value.shape[own] != len(picked) or have.shard_order[own] != axes:
                continue
            kept = keep_range(target, shape, dim, picked)
            if kept is not None and all(have.placements[a] == on_dim(p, own) for a, p in kept.placements.items()):
                same.add(at)
            else:
                moves[at] = own, _to_region(target, shape, dim, picked, have, tuple(value.shape), own)
            for axis in axes:
                layout = layout.with_placements({axis: have.placements[axis]})
        if index.mask is not None:
            at = index.gathered or 0
            own = at - (len(index.result) - len(value.shape))
            axes = OverAxes(target, index.gathered_dims()).axes
            if own >= 0 and axes and have.shard_order[own] == axes:
                layout = layout.with_placements({a: S(own) for a in axes})
                same.add(at)
        return layout, same, moves


def _to_region(
    target: Layout, shape: tuple[int, ...], dim: int, picked: range, have: Layout, sizes: tuple[int, ...], own: int
) -> Move:
    """The way of values to the ranks that hold what is picked: each gets what its overlaps need, in order."""
    group = target.info.group(tuple(sorted(target.shard_order[dim])))
    held = [indices_of(dim_intervals(have, sizes, own, c)) for c in group.coordinates]
    parts = [overlaps(dim_intervals(target, shape, dim, c), picked) for c in group.coordinates]
    return Move(group, held, [indices_of(tuple((o.result.start, o.result.stop) for o in part)) for part in parts])


class _Writing:
    """What a rank does for ``x[index] = value`` on its piece."""

    def __init__(
        self,
        index: Index,
        target: Layout,
        shape: tuple[int, ...],
        same: set[int],
        moves: dict[int, tuple[int, Move]],
        travelling: Exchange | None,
    ) -> None:
        self.index, self.target, self.shape, self.same = index, target, shape, same
        self.moves, self.travelling = moves, travelling
        here = target.info.my_coordinate()
        self.held = {d: dim_intervals(target, shape, d, here) for d in range(len(shape)) if target.shard_order[d]}
        self.choices: list[list[tuple[int, Overlap]]] = []
        for dim, picked in index.ranges().items():
            if dim in self.held:
                found = overlaps(self.held[dim], picked)
                if index.result.index(dim) in same and (kept := keep_range(target, shape, dim, picked)) is not None:
                    found = [Overlap(kept.local, slice(0, len(picked)))]
                elif index.result.index(dim) in moves:
                    ends = itertools.accumulate(o.result.stop - o.result.start for o in found)
                    starts = itertools.chain([0], ends)
                    found = [
                        Overlap(o.local, slice(start, start + o.result.stop - o.result.start))
                        for o, start in zip(found, starts, strict=False)
                    ]
                self.choices.append([(dim, overlap) for overlap in found])
        self.looked_up = {
            i.dim: HeldIndices(target, shape, i.dim) for i in [*index.ints(), *index.tensors()] if i.dim in self.held
        }
        self.mask_dims: Sequence[int] = ()
        if index.mask is not None:
            self.mask_dims = range(index.mask.dim, index.mask.dim + len(index.mask.value))

    def __call__(self, x: torch.Tensor, given: Sequence[Any], value: Any, accumulate: bool) -> torch.Tensor:
        parts = [_local_part(item, self.shape, given) for item in self.index.items]
        mine, chosen = True, None
        for own, move in self.moves.values():
            value = move(value, own)
        for at, item in enumerate(self.index.items):
            if item.kind == "int" and item.dim in self.held:
                position = self.looked_up[item.dim].position(parts[at] % self.shape[item.dim])
                mine, parts[at] = mine and position is not None, position or 0
        if any(d in self.held for d in self.mask_dims):
            value = self._by_mask(x, parts, value)
        elif any(i.dim in self.held for i in self.index.tensors()):
            if self.travelling is not None:
                value = self._arrived(x, parts, value)
            chosen = self._by_tensors(x, parts)
        blocks = list(itertools.product(*self.choices)) if mine else []
        if not blocks:
            _stay_connected(x, value)
        for block in blocks:
            where = list(parts)
            for at, item in enumerate(self.index.items):
                for dim, overlap in block:
                    if item.kind == "range" and item.dim == dim:
                        where[at] = overlap.local
            piece = self._piece(value, [(self.index.result.index(d), o.result) for d, o in block], chosen)
            if accumulate:
                _add(x, where, piece)
            else:
                x[tuple(where)] = piece
        return x

    def _by_tensors(self, x: torch.Tensor, parts: list[Any]) -> torch.Tensor:
        """Leaves, in ``parts``, the elements of the index tensors that this rank holds; returns which these are."""
        tensors = [(at, i) for at, i in enumerate(self.index.items) if i.kind == "tensor"]
        mine: torch.Tensor | None = None
        found = []
        for at, item in tensors:
            ids = torch.as_tensor(parts[at], device=x.device)
            held = self.looked_up.get(item.dim)
            if held is not None:
                ids, here = held.find(torch.where(ids < 0, ids + held.size, ids))
                mine = here if mine is None else torch.logical_and(mine, here)
            found.append(ids)
        assert mine is not None
        *found, chosen = torch.broadcast_tensors(*found, mine)
        for (at, _), ids in zip(tensors, found, strict=True):
            parts[at] = ids[chosen]
        return chosen

    def _arrived(self, x: torch.Tensor, parts: list[Any], value: Any) -> Any:
        """Leaves, in ``parts``, the elements of the sharded index tensors that fall into this rank's piece; returns the
        values for them."""
        assert self.travelling is not None
        needed: list[torch.Tensor] = []
        wholes = []
        tensors = [(at, i) for at, i in enumerate(self.index.items) if i.kind == "tensor"]
        for at, item in tensors:
            ids = torch.where(parts[at] < 0, parts[at] + self.shape[item.dim], parts[at])
            wholes.append(self.travelling.told(ids, self.shape[item.dim]))
            if item.dim == self.travelling.dim:
                needed = self.travelling.needed(wholes[-1], 0)
        mine = needed[self.travelling.rank]
        for (at, _), whole in zip(tensors, wholes, strict=True):
            parts[at] = whole[mine].to(x.device)
        at = self.index.gathered or 0
        own = at - (len(self.index.result) - value.ndim) if isinstance(value, torch.Tensor) else -1
        if own < 0 or (value.shape[own] == 1 and at not in self.same):
            return value
        if at in self.same:
            return self.travelling.bring(value, own, 0, needed)
        return value.index_select(own, mine.to(value.device))

    def _by_mask(self, x: torch.Tensor, parts: list[Any], value: Any) -> Any:
        """Leaves, in ``parts``, this rank's part of the mask; returns the values for it."""
        at = next(i for i, item in enumerate(self.index.items) if item is self.index.mask)
        layout = of_dims(self.target, self.mask_dims)
        sizes = tuple(self.shape[d] for d in self.mask_dims)
        mask = torch.as_tensor(parts[at], device=x.device).to(torch.bool)
        parts[at] = mask if self.index.items[at].ref is not None else local_piece(mask, layout)
        if not isinstance(value, torch.Tensor):
            return value
        own = (self.index.gathered or 0) - (len(self.index.result) - value.ndim)
        if own < 0 or (value.shape[own] == 1 and (self.index.gathered or 0) not in self.same):
            return value
        picked = Picked(parts[at], layout, sizes)
        if (self.index.gathered or 0) in self.same:
            return picked.collect(value, own)
        if value.shape[own] != picked.total:
            raise RuntimeError(
                f"shape mismatch: {value.shape[own]} values for {picked.total} elements that the mask picks"
            )
        return value.index_select(own, picked.places.to(x.device))

    def _piece(self, value: Any, cuts: list[tuple[int, slice]], chosen: torch.Tensor | None) -> Any:
        """The part of the value that goes to this rank."""
        if not isinstance(value, torch.Tensor):
            return value
        added = len(self.index.result) - value.ndim
        for at, cut in cuts:
            own = at - added
            if own >= 0 and value.shape[own] != 1 and at not in self.same:
                value = value.narrow(own, cut.start, cut.stop - cut.start)
        if chosen is None or not value.ndim:
            return value
        # The dims that the index tensors make become one, of those elements that are here.
        first, count = (self.index.gathered or 0) - added, chosen.ndim
        last = first + count
        if last <= 0:
            return value
        sizes = list(value.shape)
        sizes[max(first, 0) : last] = chosen.shape
        value = value.expand(sizes) if first >= 0 else value.expand(*chosen.shape, *value.shape[last:])
        first = max(first, 0)
        rows = value.movedim(list(range(first, first + count)), list(range(count)))[chosen]
        return rows.movedim(0, first)


def _spread_with(call: Call, index: Index, target: Layout) -> Item | None:
    """The index tensor of the one sharded dim that index tensors mean, where all of these are vectors that are sharded
    by that dim's mesh axes."""
    tensors = index.tensors()
    found = [i for i in tensors if target.shard_order[i.dim]]
    if index.has_mask or len(found) != 1:
        return None
    axes = target.shard_order[found[0].dim]
    for item in tensors:
        layout = None if item.ref is None else item.ref.spec.layout
        if layout is None or item.value != index.broadcast or len(item.value) != 1 or layout.shard_order[0] != axes:
            return None
        if any(type(layout.placements[a]) is not Shard or type(target.placements[a]) is not Shard for a in axes):
            return None
        if layout.is_partial():
            return None
    return found[0]


def _spread_values(call: Call, index: Index, value: Ref, layout: Layout, spread: Item) -> tuple[Layout, int | None]:
    """Layout of the values for index tensors that are sharded: as these, where they are already."""
    own = (index.gathered or 0) - (len(index.result) - len(value.shape))
    have, axes = value.spec.layout, call.inputs[0].layout.shard_order[spread.dim]
    if own < 0 or value.shape[own] != spread.value[0] or have.shard_order[own] != axes:
        return layout, None
    if any(type(have.placements[a]) is not Shard for a in axes):
        return layout, None
    for axis in axes:
        layout = layout.with_placements({axis: S(own)})
    return layout, own


def _local_part(item: Item, shape: tuple[int, ...], given: Sequence[Any]) -> Any:
    if item.kind == "range":
        picked = item.value
        return slice(None) if len(picked) == shape[item.dim] else slice(picked.start, picked.stop, picked.step)
    if item.kind == "int":
        return item.value if item.ref is None else int(given[item.where or 0])
    return None if item.kind == "new" else given[item.where or 0]


def _add(x: torch.Tensor, where: Sequence[Any], value: Any) -> None:
    """``x[where] += value`` with repeated indices added each time; ``where`` holds slices and index tensors."""
    region = x[tuple(part if isinstance(part, slice) else slice(None) for part in where)]
    indices = [None if isinstance(part, slice) else torch.as_tensor(part, device=x.device) for part in where]
    while indices and indices[-1] is None:
        indices.pop()
    value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    region.index_put_(tuple(indices), value, accumulate=True)


def _with_names(local: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the keyword names of the methods (``indices``, ``values``) too."""

    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(("indices", "values", "accumulate"), args, strict=False)) | kwargs
        return local(x, given["indices"], given["values"], given.get("accumulate", False))

    return call


def _stay_connected(x: torch.Tensor, value: Any) -> None:
    """A rank that writes nothing still takes part in the backward pass, whose collectives need all ranks."""
    if isinstance(value, torch.Tensor) and value.requires_grad and x.ndim:
        x.narrow(0, 0, 0).copy_(value.reshape(-1)[:1].sum())


def neutral_of_number(target: Layout) -> int | None:
    """What a number counts as on this rank: a pending sum holds it once. None for the number itself."""
    here = target.info.my_coordinate()
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Partial) and here[axis]:
            if placement.reduce_op == "sum":
                return 0
            if placement.reduce_op == "product":
                return 1
    return None


def _check(call: Call, targets: list[Layout]) -> None:
    for position, (spec, wanted) in enumerate(zip(call.inputs, targets, strict=True)):
        if spec.layout is wanted or not plan_transition(spec.layout, wanted, tuple(spec.shape)).communicates:
            continue
        both = zip(spec.layout.placements, wanted.placements, strict=True)
        pending_only = all(have == want or isinstance(have, (Partial, Replicate)) for have, want in both)
        if call.mode.policy == "strict" or (call.mode.policy != "auto" and not pending_only):
            raise refuse(
                call,
                f"input {position} does not fit the region of the target that it is written to, which needs {wanted}",
                f"redistribute input {position} to {wanted}, or use redistribute_policy('auto')",
            )
