"""``x[index] = value``, ``index_put_``: every rank writes what it holds of the picked region.

The target keeps its layout. Slices and ints may run over sharded dimensions, at any position; of index tensors and
masks every rank takes what falls into its piece, and of the values what belongs to that. Index tensors and values that
are sharded by the mesh axes of the dimension stay so: what concerns other ranks travels there. What is written to a
target that is whole is gathered, as every rank needs it; what is added, not in place, leaves a pending sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Replicate, Shard
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    LayoutOp,
    OpSummary,
    P,
    Ref,
    S,
    Solution,
    Spec,
    casts_by_term,
    dim_intervals,
    indices_of,
    is_replicate,
    keep_range,
    on_dim,
    overlaps,
    plan_transition,
    refuse,
)
from hyper_parallel_ops_basic.indexing.gathered_inputs import gathered_inside
from hyper_parallel_ops_basic.indexing.index import Index, parts_of
from hyper_parallel_ops_basic.indexing.mask_positions import of_dims
from hyper_parallel_ops_basic.indexing.setitem.local_write import Value, Writing
from hyper_parallel_ops_basic.indexing.setitem.sent_values import Travelling, travelling_with
from hyper_parallel_ops_basic.indexing.sharded_masks import (
    axes_of,
    beside_of,
    in_chunks,
    leading,
    lying_as_picked,
    the_sharded_mask,
)


class SetItem(LayoutOp):
    """``x[index] = value``; ``index_put(indices, values, accumulate)`` is the same with tensors only."""

    summary = OpSummary(
        "every dim of the target; the values are sharded by its axes, lie like what the mask picks, or are whole",
        pending="stays, with pending values",
        communicates=(
            "values that do not lie where they go: 1 all-to-all | the same; mask with values: 1 or 2 all-gathers of "
            "counts and indices (and 1 all-to-all of sharded values, and of each index tensor beside it); index "
            "tensors or values sharded as their dim: 1 all-gather of each index tensor (and 1 all-to-all of the "
            "values) | 1 all-to-all; index or values of a whole target: 1 all-gather of each | slice; values that are "
            "added, not in place: none, a pending sum"
        ),
        whole="values that lie otherwise; a second mask; index and values of a target that is whole",
    )

    signature = "input, indices, values, accumulate=False"

    def solve(self, call: Call) -> Solution:
        given = call.arg("indices")
        index = Index(tuple(given) if self._by_tensors(call) else given, call.inputs[0].shape)
        value = call.arg("values")
        if isinstance(value, Ref):
            index.check_value(value.shape, leading_ones=not self._by_tensors(call))
        target = call.inputs[0].layout.placements
        added = _added_over(call, index)
        axes = {
            i: [a for order in spec.layout.shard_order for a in order if is_replicate(target[a]) and a not in added]
            for i, spec in enumerate(call.inputs)
            if i
        }
        return gathered_inside(call, axes, lambda whole: self._solve(whole, index, _added_over(whole, index)))

    @staticmethod
    def _by_tensors(call: Call) -> bool:
        return call.name != "__setitem__"  # index_put takes a list of tensors

    def _solve(self, call: Call, index: Index, added: frozenset[int]) -> Solution:
        """The rule where nothing has to be gathered."""
        by_tensors = self._by_tensors(call)
        target = call.inputs[0].layout.with_placements(dict.fromkeys(added, P))
        targets = [spec.layout.replicated() for spec in call.inputs]
        targets[0] = target
        lead = leading(call, index)
        if lead is not None and lead.ref is not None:
            targets[lead.ref.index] = of_dims(target, lead.dims)
        mask = the_sharded_mask(lead, target, index.shape)
        for item in [] if mask is None else lying_as_picked(call, index, axes_of(mask.layout)):
            targets[item.ref.index] = call.inputs[item.ref.index].layout  # type: ignore[union-attr]
        value = _value(call, index, target)
        travelling = _let_travel(call, index, target, targets, value, added)
        for axis in added:
            _keep_terms(call, index, axis, targets, value)
        if (given := call.index("values")) is not None:
            targets[given] = value.layout
        _check(call, targets)
        write = Writing(index, target, value, mask, beside_of(call, index, mask, targets), travelling)
        in_place, neutral, arguments = call.inplace, neutral_of_number(target), self.arguments

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = arguments.bind(args, kwargs)
            x, parts, values = bound["input"], bound["indices"], bound["values"]
            parts = tuple(parts) if by_tensors else parts_of(parts)
            if neutral is not None and not isinstance(values, torch.Tensor):
                values = neutral
            return write(x if in_place else x.clone(), parts, values, bound.get("accumulate", False))

        def on_meta(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return x if in_place else torch.empty_like(x)

        return Solution(targets, [target], local, meta=on_meta)


def _value(call: Call, index: Index, target: Layout) -> Value:
    """Layout that the value must have: pending where the target is, sharded by the target's axes where it is."""
    if call.index("values") is None:
        return Value(index)
    have, shape = call.spec("values").layout, index.shape
    value = Value(index, have, tuple(call.spec("values").shape))
    pending = {a: p for a, p in enumerate(target.placements) if isinstance(p, Partial)}
    if pending and not casts_by_term(call.spec("values").dtype, call.inputs[0].dtype):
        raise refuse(
            call,
            f"terms of {call.spec('values').dtype} cannot be rounded one by one to those of the pending target",
            f"cast the values first, to {call.inputs[0].dtype}",
        )
    value.layout = value.layout.with_placements(pending)
    for dim, picked in index.ranges().items():
        axes = target.shard_order[dim]
        at = index.result.index(dim)
        own = value.own_dim(at)
        if not axes or own is None or value.shape[own] != len(picked) or have.shard_order[own] != axes:
            continue
        kept = keep_range(target, shape, dim, picked)
        if kept is not None and all(have.placements[a] == on_dim(p, own) for a, p in kept.placements.items()):
            value.lies.add(at)
        else:
            value.moves[at] = own, _to_region(target, shape, dim, picked, have, value.shape, own)
        value.keep(axes)
    if (mask := leading(call, index)) is not None:
        own, over = value.own_dim(index.picked), {a for d in mask.dims for a in target.shard_order[d]}
        if own is not None and value.shape[own] != 1 and in_chunks(have, own, over):
            value.keep(have.shard_order[own])
            value.lies.add(index.picked)
    return value


def _to_region(
    target: Layout, shape: tuple[int, ...], dim: int, picked: range, have: Layout, sizes: tuple[int, ...], own: int
) -> ExchangePlan:
    """The way of values to the ranks that hold what is picked: each gets what its overlaps need, in order."""
    group = target.info.group(tuple(sorted(target.shard_order[dim])))
    held = [indices_of(dim_intervals(have, sizes, own, c)) for c in group.coordinates]
    parts = [overlaps(dim_intervals(target, shape, dim, c), picked) for c in group.coordinates]
    return ExchangePlan(
        group, held, [indices_of(tuple((o.result.start, o.result.stop) for o in part)) for part in parts]
    )


def _let_travel(
    call: Call, index: Index, target: Layout, targets: list[Layout], value: Value, added: frozenset[int]
) -> Travelling | None:
    """Keep index tensors and values sharded whose elements travel to the ranks that hold their places; not along a dim
    of which other axes add a part each."""
    travelling = travelling_with(call, index, target, value)
    if travelling is not None and travelling.at in {_added_along(call, index, axis) for axis in added}:
        return None
    if travelling is not None:
        for item in travelling.told:
            assert item.ref is not None
            kept = dict.fromkeys(travelling.axes, S(travelling.place))
            targets[item.ref.index] = targets[item.ref.index].with_placements(kept)
        if travelling.brings:
            value.keep(travelling.axes)
            value.lies.add(travelling.at)
    return travelling


def _added_over(call: Call, index: Index) -> frozenset[int]:
    """Mesh axes over which sharded values are added to a target that is whole or a pending sum: each rank adds those
    that it has, and the result is pending."""
    if not call.arg("accumulate") or index.has_mask or not isinstance(call.arg("values"), Ref):
        return frozenset()
    value, target = call.spec("values"), call.inputs[0].layout.placements
    found = set()
    for axis, placement in enumerate(value.layout.placements):
        fits = target[axis] == P or (is_replicate(target[axis]) and not call.inplace)
        if type(placement) is Shard and fits and _along(index, value, placement.dim) is not None:
            found.add(axis)
    return frozenset(found)


def _along(index: Index, value: Spec, own: int) -> int | None:
    """The dim of the result that a value's dim is, where it is one that index tensors make, each of which knows which
    of its elements go with which value."""
    at = own + len(index.result) - len(value.shape)
    if at not in index.gathered or index.broadcast is None or value.shape[own] == 1:
        return None
    own_dims = [(item, at - index.gathered.stop + len(item.value)) for item in index.tensors()]
    fits = all(d < 0 or item.value[d] == 1 or item.ref is not None for item, d in own_dims)
    return at if fits and value.shape[own] == index.broadcast[at - index.gathered.start] else None


def _added_along(call: Call, index: Index, axis: int) -> int:
    """The dim of the result along which a mesh axis shards values that are added."""
    value = call.spec("values")
    return value.layout.placements[axis].dim + len(index.result) - len(value.shape)  # type: ignore[attr-defined]


def _keep_terms(call: Call, index: Index, axis: int, targets: list[Layout], value: Value) -> None:
    """Values and what goes with them stay sharded over a mesh axis over which they are added."""
    at = _added_along(call, index, axis)
    value.keep([axis])
    value.lies.add(at)
    for item in index.tensors():
        d = at - index.gathered.stop + len(item.value)
        if d >= 0 and item.value[d] != 1 and item.ref is not None:
            i = item.ref.index
            targets[i] = targets[i].with_placements({axis: S(d)})


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


def _check(call: Call, targets: Sequence[Layout]) -> None:
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
