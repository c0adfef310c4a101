"""Matching a call's inputs with the rows of its rule.

Every mesh axis is matched on its own (so the work grows linearly with the mesh's rank), then the axes are checked
jointly: operands that share a dimension must be sharded by the same axes in the same order. Of the redistributions that
the policy allows the cheapest is taken; where there is none, the error says what would have fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel._rules.call import Call, refuse
from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import (
    PackedShard,
    Placement,
    Replicate,
    Shard,
    is_partial,
    is_replicate,
    is_shard,
    on_dim,
    short,
)

if TYPE_CHECKING:
    from hyper_parallel._rules.strategy import Strategy, StrategyOp

_R = Replicate()
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Row:
    """A strategy of one call, spelled out.

    Attributes:
        inputs: a placement per tensor input.
        outputs: one per output.
        invariant: positions of inputs that stay invariant.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    invariant: frozenset[int]

    @classmethod
    def of(cls, op: StrategyOp, call: Call, strategy: Strategy, count: int) -> Row:
        """The row of a strategy of ``op`` for a call with ``count`` outputs."""
        if isinstance(strategy.inputs, Mapping):
            inputs: list[Placement] = [_R] * len(call.inputs)
            for name, placement in strategy.inputs.items():
                call.check_name(name)
                index = call.index(name)
                if index is not None:
                    inputs[index] = placement
        elif len(strategy.inputs) > len(call.inputs):
            raise _wrong_count(call, strategy, f"{len(call.inputs)} tensor inputs")
        else:
            inputs = [*strategy.inputs, *[_R] * (len(call.inputs) - len(strategy.inputs))]
        given = strategy.outputs
        outputs = tuple(given) if isinstance(given, (tuple, list)) else (given,) * count
        if len(outputs) != count:
            raise _wrong_count(call, strategy, f"{count} results, says num_outputs")
        invariant = op.positions(call, strategy.invariant) if strategy.invariant else _NONE
        return cls(tuple(inputs), outputs, invariant)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{', '.join(map(short, self.inputs))} -> {', '.join(map(short, self.outputs))}"


def _wrong_count(call: Call, strategy: Strategy, right: str) -> TypeError:
    return TypeError(f"the rule of {call.name} lists {strategy}, but the call has {right}")


class StrategyRows:
    """An operator's rows, made as they are asked for: most calls match one of the first."""

    def __init__(self, op: StrategyOp, call: Call, strategies: Iterable[Strategy], count: int) -> None:
        self.known: list[Row] = []
        self.more = self._make(op, call, strategies, count)

    @staticmethod
    def _make(op: StrategyOp, call: Call, strategies: Iterable[Strategy], count: int) -> Iterator[Row]:
        everything = False
        for strategy in strategies:
            row = Row.of(op, call, strategy, count)
            everything = everything or all(map(is_replicate, row.inputs))
            yield row
        if not everything:
            yield Row((_R,) * len(call.inputs), (_R,) * count, _NONE)

    def __iter__(self) -> Iterator[Row]:
        yield from self.known
        for row in self.more:
            self.known.append(row)
            yield row


def match(
    call: Call, rows: StrategyRows, count: int, largest_output: int
) -> tuple[list[Row], list[Layout], list[Layout]]:
    """The row chosen for each mesh axis, the inputs' targets and the layouts of the ``count`` outputs.

    Args:
        largest_output: number of elements, where the rule knows it.

    Raises:
        RedistributionError: nothing fits that the policy allows.
    """
    chosen: list[Row] = []
    for axis in range(call.info.ndim):
        chosen.append(_choose(call, rows, axis, largest_output, chosen))
    targets, outputs = _joint(call, chosen, count)
    _check_policy(call, targets)
    return chosen, targets, outputs


# -- one axis -----------------------------------------------------------------------------------------------------

_FORBIDDEN = float("inf")


def _choose(call: Call, rows: Iterable[Row], axis: int, largest_output: int, before: Sequence[Row]) -> Row:
    """The cheapest row for one mesh axis, given those chosen for the axes before it."""
    current = [spec.layout.placements[axis] for spec in call.inputs]
    best: Row | None = None
    best_cost: tuple[float, int] = (_FORBIDDEN, 0)
    for row in rows:
        if before and _packs_pieces(row, before):
            continue
        cost = _row_cost(call, row, current, largest_output)
        if cost < best_cost:
            best, best_cost = row, cost
            if not any(cost):
                break
    if best is None:
        raise _no_strategy(call, rows, axis)
    return best


def _packs_pieces(row: Row, before: Sequence[Row]) -> bool:
    """Whether a row would pack a dimension that an earlier axis shards: PackedShard is always outermost."""
    return any(
        placement.__class__ is PackedShard
        and any(is_shard(p := r.inputs[i]) and p.dim == placement.dim for r in before)
        for i, placement in enumerate(row.inputs)
    )


def _row_cost(call: Call, row: Row, current: Sequence[Placement], largest_output: int) -> tuple[float, int]:
    """Elements to communicate and number of conversions; infinite when the policy forbids it."""
    policy = call.mode.policy
    pairs = list(zip(current, row.inputs, strict=True))
    alike = [have == want or (is_shard(have) and is_shard(want) and have.dim == want.dim) for have, want in pairs]
    if call.inplace and (not alike[0] or row.outputs[0] != row.inputs[0]):
        return _FORBIDDEN, 0  # the target of an in-place operator keeps its placements
    anchored = policy == "auto" or any(same and is_shard(have) for same, (have, _) in zip(alike, pairs, strict=True))
    total: float = 0
    conversions = 0
    for spec, same, (have, want) in zip(call.inputs, alike, pairs, strict=True):
        if same:
            continue
        if is_shard(want) and not anchored:
            return _FORBIDDEN, 0  # nothing is sharded like this: do not start sharding on our own
        each = _conversion_cost(have, want, policy)
        if each == _FORBIDDEN:
            return _FORBIDDEN, 0
        total += each * spec.shape.numel()
        conversions += 1
    if policy != "strict" and any(map(is_partial, row.outputs)):
        pending = max((s.shape.numel() for s, p in zip(call.inputs, current, strict=True) if is_partial(p)), default=0)
        if total:
            # Reduce all operands rather than some: what stays pending is paid for later, a reduced form is remembered.
            total += _ALL_REDUCE * max(largest_output, pending) + 1
        elif pending and largest_output > pending:
            total += _ALL_REDUCE * largest_output  # a product that grows is cheaper to reduce before
    return total, conversions


# Elements that travel, per element of the tensor whose placement changes.
_MOVE = 1  # all-to-all and reduce-scatter: each goes once to the rank that keeps it
_ALL_REDUCE = 2  # a reduce-scatter and an all-gather
_GATHER = 1.5  # moves as much as an all-to-all, but the work behind it is then done by all ranks: taken after that


def _conversion_cost(have: Placement, want: Placement, policy: str) -> float:
    """What one element costs on its way from one placement to another; infinite when the policy forbids it."""
    if is_replicate(have):
        return 0  # each rank keeps its part of what it has, or one keeps all
    if is_partial(have) and not is_partial(want):
        return _FORBIDDEN if policy == "strict" else _ALL_REDUCE if is_replicate(want) else _MOVE
    if policy != "auto":
        return _FORBIDDEN
    if is_partial(want):
        return _ALL_REDUCE  # from a shard nothing travels yet, but the sum is then due later
    return _GATHER if is_replicate(want) else _MOVE


def _no_strategy(call: Call, rows: Iterable[Row], axis: int) -> ValueError:
    name = call.info.names[axis]
    current = ", ".join(short(spec.layout.placements[axis]) for spec in call.inputs)
    if call.inplace:
        fix = (
            "an in-place operator cannot change its target's placements: redistribute the operands to fit it, "
            "or use the out-of-place form"
        )
    elif call.mode.policy == "strict":
        fix = "redistribute(...) the inputs to one of these, or use redistribute_policy('auto')"
    else:
        fix = "x = x.redistribute(placements=[...]) before the call, or with redistribute_policy('auto'): ..."
    listed = [str(row) for row in rows]
    why = f"no strategy takes ({current}) on mesh axis {name!r}; it takes\n    " + "\n    ".join(listed[:8])
    return refuse(call, why, fix, listed)


# -- all axes together --------------------------------------------------------------------------------------------

_Slot = tuple[int, int]  # (input index, or -1 - output index; tensor dim)


def _joint(call: Call, chosen: Sequence[Row], count: int) -> tuple[list[Layout], list[Layout]]:
    """Layouts of inputs and outputs from one row per axis, with a shard order that all operands share."""
    group_of: dict[_Slot, int] = {}
    groups: list[set[_Slot]] = []
    sharded_by: dict[_Slot, list[int]] = {}
    for axis, row in enumerate(chosen):
        slots = _sharded(row)
        slots += [(-1 - i, p.dim) for i, p in enumerate(row.outputs) if is_shard(p)]
        for slot in slots:
            sharded_by.setdefault(slot, []).append(axis)
        known = {group_of[s] for s in slots if s in group_of}
        merged = set(slots).union(*(groups[g] for g in known))
        groups.append(merged)
        group_of.update(dict.fromkeys(merged, len(groups) - 1))

    orders: dict[int, list[int]] = {}
    for index in set(group_of.values()):
        orders[index] = _group_order(call, groups[index], sharded_by)

    def layout(operand: int, ndim: int, base: Layout) -> Layout:
        placements = []
        for axis, row in enumerate(chosen):
            want = row.inputs[operand] if operand >= 0 else row.outputs[-1 - operand]
            if is_shard(want):
                packed = _like_anchor(call, row, axis, want)
                # Where one operand has another size and so no such sections, neither have the others and the result.
                want = packed if all(_has_sections(packed, sizes[i][dim]) for i, dim in _sharded(row)) else want
            placements.append(want)
        order = []
        for dim in range(ndim):
            mine = sharded_by.get((operand, dim), ())
            shared = orders[group_of[(operand, dim)]] if mine else ()
            order.append(tuple(a for a in shared if a in mine))
        return base.with_order(tuple(placements), tuple(order))

    base = call.inputs[0].layout
    sizes = [spec.shape for spec in call.inputs]
    targets = [layout(i, spec.layout.ndim, spec.layout) for i, spec in enumerate(call.inputs)]
    # An output may have more dims than any shard tells: the dispatcher pads the order once it knows the rank.
    widest = [1 + max((p.dim for row in chosen if is_shard(p := row.outputs[o])), default=-1) for o in range(count)]
    outputs = [layout(-1 - o, widest[o], base) for o in range(count)]
    return targets, outputs


def _sharded(row: Row) -> list[_Slot]:
    """The sharded dims of the inputs."""
    return [(i, p.dim) for i, p in enumerate(row.inputs) if is_shard(p)]


def _has_sections(placement: Placement, size: int) -> bool:
    return type(placement) is not PackedShard or sum(placement.sections) == size


def _group_order(call: Call, slots: set[_Slot], sharded_by: Mapping[_Slot, list[int]]) -> list[int]:
    """Order of the axes that shard one shared dimension: that of the first operand that has most of them already."""
    axes = sorted({a for slot in slots for a in sharded_by[slot]})
    if len(axes) == 1:
        return axes
    best: tuple[int, ...] = ()
    for operand, dim in sorted(slots):
        if operand >= 0:
            have = tuple(a for a in call.inputs[operand].layout.shard_order[dim] if a in axes)
            if len(have) > len(best):
                best = have
    return [*best, *(a for a in axes if a not in best)]


def _like_anchor(call: Call, row: Row, axis: int, want: Shard) -> Placement:
    """``want``, packed as the operand that is sharded already is packed, unless the row itself says how."""
    if isinstance(want, PackedShard):
        return want
    for spec, placement in zip(call.inputs, row.inputs, strict=True):
        have = spec.layout.placements[axis]
        # A row that names its packing has matched exactly, and its plain shards are meant.
        if is_shard(have) and placement.__class__ is Shard and have.dim == placement.dim:
            return on_dim(have, want.dim)
    return want


def _check_policy(call: Call, targets: Sequence[Layout]) -> None:
    """Refuse a change of shard order or packing that the per-axis match could not see."""
    if call.mode.policy == "auto":
        return
    for index, (spec, target) in enumerate(zip(call.inputs, targets, strict=True)):
        if spec.layout is target:
            continue
        for have, want in zip(spec.layout.shard_order, target.shard_order, strict=True):
            same = have == want[: len(have)] and all(spec.layout.placements[a] == target.placements[a] for a in have)
            if not same and plan_transition(spec.layout, target, spec.shape).communicates:
                names = call.info.names
                raise refuse(
                    call,
                    f"input {index} would have to change from {spec.layout} to {target}, so that operands which share "
                    f"a dimension are sharded by the same mesh axes ({', '.join(names[a] for a in want)}) in the same "
                    "order",
                    f"redistribute input {index} to that layout, or use redistribute_policy('auto')",
                )
