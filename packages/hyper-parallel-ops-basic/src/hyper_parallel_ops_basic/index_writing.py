"""``x[index] = value`` and ``index_put_``: every rank writes the part of the picked region that it holds.

The target keeps its layout. Slices and ints may run over sharded dimensions, at any position; index tensors and masks
read whole dimensions, except a mask with one number for all elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.boxes import dim_intervals
from hyper_parallel.call import Call, Ref, Solution, refuse
from hyper_parallel.families.ranges import Overlap, keep_range, overlaps
from hyper_parallel.layout import Layout
from hyper_parallel.placements import Partial, Placement, Replicate, on_dim
from hyper_parallel.strategy import LayoutOp
from hyper_parallel.transition import plan_transition
from hyper_parallel_ops_basic.index_arguments import Index
from hyper_parallel_ops_basic.indexing import local_parts


class SetItem(LayoutOp):
    """``x[index] = value``; ``index_put_(indices, values)`` is the same with tensors only."""

    signature = "input, indices, values, accumulate=False"

    def solve(self, call: Call) -> Solution:
        target = call.inputs[0].layout
        shape = tuple(call.inputs[0].shape)
        by_tensors = call.name != "__setitem__"  # index_put_ takes a list of tensors
        given = call.arg("indices")
        index = Index(tuple(given) if by_tensors else given, shape)
        value = call.arg("values")
        number = not isinstance(value, Ref) or not value.shape
        targets = [spec.layout.replicated() for spec in call.inputs]
        targets[0] = target
        same: set[int] = set()  # dims of the result on which a sharded value lies as the target does
        masks = [i for i in index.items if i.kind == "mask"]
        if number and len(masks) == 1 and len(index.gathered_dims()) == len(masks[0].value):
            mask = masks[0]
            if mask.ref is not None:
                targets[mask.ref.index] = _of_mask(target, mask.dim, len(mask.value))
            elif any(target.shard_order[d] for d in index.gathered_dims()):
                raise self._gathers_sharded(call, index)
        elif any(target.shard_order[d] for d in index.gathered_dims()):
            raise self._gathers_sharded(call, index)
        if isinstance(value, Ref):
            targets[value.index], same = self._value_layout(call, index, value, target)
        _check(call, targets)
        if call.arg("accumulate"):
            raise refuse(call, "accumulate=True has no rule", "use index_add_ or scatter_add_")
        local = self._write(index, target, shape, same, by_tensors)
        return Solution(targets, [target], local, meta=lambda x, *args, **kwargs: x)

    @staticmethod
    def _gathers_sharded(call: Call, index: Index) -> Exception:
        return refuse(
            call,
            f"an index tensor or mask reads dimensions {tuple(index.gathered_dims())} of the target, one of which is "
            "sharded, so that a rank cannot tell which of its elements are meant",
            "redistribute the target first, or use scatter, index_copy or where",
        )

    @staticmethod
    def _value_layout(call: Call, index: Index, value: Ref, target: Layout) -> tuple[Layout, set[int]]:
        """Layout that the value must have: pending where the target is; sharded like it where it already is."""
        have = value.spec.layout
        layout = have.replicated().with_placements(
            {a: p for a, p in enumerate(target.placements) if isinstance(p, Partial)}
        )
        same: set[int] = set()
        for dim, picked in index.ranges().items():
            axes = target.shard_order[dim]
            if not axes:
                continue
            at = index.result.index(dim)
            own = at - (len(index.result) - len(value.shape))
            kept = keep_range(target, tuple(call.inputs[0].shape), dim, picked)
            if own < 0 or kept is None or value.shape[own] != len(picked) or have.shard_order[own] != axes:
                continue
            wanted = {a: on_dim(p, own) for a, p in kept.placements.items()}
            if all(have.placements[a] == p for a, p in wanted.items()):
                for axis in axes:
                    layout = layout.with_placements({axis: wanted[axis]})
                same.add(at)
        return layout, same

    @staticmethod
    def _write(
        index: Index, target: Layout, shape: tuple[int, ...], same: set[int], by_tensors: bool
    ) -> Callable[..., Any]:
        here = target.info.my_coordinate()
        held = {d: dim_intervals(target, shape, d, here) for d in range(len(shape)) if target.shard_order[d]}
        choices: list[list[tuple[int, Overlap]]] = []
        fixed: dict[int, int] = {}
        for dim, picked in index.ranges().items():
            if dim in held:
                kept = keep_range(target, shape, dim, picked) if index.result.index(dim) in same else None
                found = overlaps(held[dim], picked) if kept is None else [Overlap(kept.local, slice(0, len(picked)))]
                choices.append([(dim, overlap) for overlap in found])
        mine = True
        for dim, position in index.ints().items():
            if dim in held:
                found = overlaps(held[dim], range(position, position + 1))
                mine = mine and bool(found)
                fixed[dim] = found[0].local.start if found else 0
        blocks = list(itertools.product(*choices)) if mine else []
        neutral = neutral_of_number(target)

        def write(x: torch.Tensor, given: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            given = tuple(given) if isinstance(given, tuple) or by_tensors else (given,)
            if neutral is not None and not isinstance(value, torch.Tensor):
                value = neutral
            if not blocks:
                _stay_connected(x, value)
            for block in blocks:
                parts = local_parts(index, {d: o.local for d, o in block})
                where = tuple(given[p] if isinstance(p, int) else p.value for p in parts)
                where = _with_ints(index, where, fixed)
                piece = _piece(value, index, [(index.result.index(d), o.result) for d, o in block], same)
                x[where] = piece
            return x

        return write


def _with_ints(index: Index, where: tuple[Any, ...], fixed: dict[int, int]) -> tuple[Any, ...]:
    return tuple(fixed.get(i.dim, p) if i.kind == "int" else p for i, p in zip(index.items, where, strict=True))


def _piece(value: Any, index: Index, cuts: list[tuple[int, slice]], same: set[int]) -> Any:
    """The part of the value that goes to this rank."""
    if not isinstance(value, torch.Tensor):
        return value
    added = len(index.result) - value.ndim
    for at, cut in cuts:
        own = at - added
        if own >= 0 and value.shape[own] != 1 and at not in same:
            value = value.narrow(own, cut.start, cut.stop - cut.start)
    return value


def _stay_connected(x: torch.Tensor, value: Any) -> None:
    """A rank that writes nothing still takes part in the backward pass, whose collectives need all ranks."""
    if isinstance(value, torch.Tensor) and value.requires_grad and x.ndim:
        x.narrow(0, 0, 0).copy_(value.reshape(-1)[:1].sum())


def _of_mask(target: Layout, first: int, count: int) -> Layout:
    """A mask over ``count`` dims from ``first`` of the target, laid out like them."""
    placements: dict[int, Placement] = {}
    order = [target.shard_order[d] for d in range(first, first + count)]
    for dim, axes in enumerate(order):
        for axis in axes:
            placements[axis] = on_dim(target.placements[axis], dim)
    return target.with_order(tuple(placements.get(a, Replicate()) for a in range(len(target.placements))), tuple(order))


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
