"""Strategies: an operator's mathematics as a list of legal placements for one mesh axis.

    class IndexAdd(StrategyOp):
        signature = "input, dim, index, source, *, alpha=1"

        def strategies(self, call):
            dim = call.dim("dim")
            for d in range(call.inputs[0].layout.ndim):
                if d != dim:
                    yield Strategy({"input": S(d), "source": S(d)}, S(d))      # other dims may be sharded alike
            yield Strategy({"input": P, "source": P}, P)                        # linear
            yield Strategy({"input": P, "index": S(0), "source": S(dim)}, P)    # sharded sources leave a pending sum

Inputs that a row does not name are Replicate, and "everything Replicate" is always legal. The engine matches every mesh
axis on its own (so the work grows linearly with the mesh's rank), then checks the axes jointly: operands that share a
dimension must be sharded by the same axes in the same order. It picks the cheapest redistribution that the policy
allows and writes the error when there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.call import Call, Signature, Solution, refuse
from hyper_parallel.layout import Layout
from hyper_parallel.op import DistributedOp
from hyper_parallel.placements import (
    PackedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    is_partial,
    is_replicate,
    is_shard,
    on_dim,
    short,
)
from hyper_parallel.transition import plan_transition

__all__ = ["LayoutOp", "P", "R", "S", "Strategy", "StrategyOp"]

R = Replicate()
P = Partial("sum")
_NONE: frozenset[int] = frozenset()
_SHARDS = tuple(Shard(d) for d in range(16))


def S(dim: int) -> Shard:
    """``Shard(dim)``, shared."""
    return _SHARDS[dim] if 0 <= dim < 16 else Shard(dim)


@dataclass(frozen=True)
class Strategy:
    """One legal combination of placements on one mesh axis.

    Attributes:
        inputs: placement of each tensor input, by position or by name; what is left out is Replicate.
        outputs: placement of the output, or one per output.
        invariant: inputs (as in ``inputs``) used only after the operator's own reduction, which therefore keep a whole
            gradient on every rank.
    """

    inputs: Sequence[Placement] | Mapping[str, Placement]
    outputs: Placement | Sequence[Placement]
    invariant: Sequence[int | str] = ()


class LayoutOp(DistributedOp):
    """A rule that decides from a :class:`~hyper_parallel.call.Call`; :meth:`solve` is all that a subclass writes.

    Attributes:
        signature: parameter names, when the rule reads arguments by name.
        arguments: the signature, with which a local function reads its own: ``self.arguments.bind(args, kwargs)``.
        scalars_matter: whether an int argument (beyond its type) can change a layout. False lets ``x * 3`` and ``x *
            4`` share a cache entry.
        floats_matter: whether a float argument can change one too (the order of a norm). A rule that reads a float
            while this is False must read it from the local arguments.
        uncounted: names or positions of tensor inputs read only for dtype, device or shape.
        makes_views: whether the result may share memory with the first input.
        carries_writes: whether :meth:`carry_write` is defined.
    """

    signature: str | None = None
    scalars_matter: bool = True
    floats_matter: bool = False
    uncounted: Sequence[int | str] = ()
    makes_views: bool = False
    carries_writes: bool = False
    cache_expand = True

    def __init__(self, op_name: str, **params: Any) -> None:
        super().__init__(op_name, **params)
        self.arguments = Signature(self.signature or "")

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        """Write ``value``, the result number ``position`` of ``func(*args, **kwargs)``, to the part of the first
        argument that it shows. Called after a write to a result that is a copy where one device has a view, when
        ``carries_writes`` is true; such a write is refused otherwise."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define carry_write")

    def solve(self, call: Call) -> Solution:
        """Targets of the inputs and layouts of the outputs.

        Raises:
            RedistributionError: when the inputs do not fit and the policy allows no way out.
        """
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define solve")

    # -- the three phases, as the dispatcher inlines them -----------------------------------------------------------

    def preprocess(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Local arguments, and the :class:`Call` as the only cache value."""
        from hyper_parallel.arguments import local_arguments, make_call

        call = make_call(self, None, tuple(args), kwargs)
        local_args, local_kwargs = local_arguments(args, kwargs)
        return local_args, local_kwargs, (call,)

    def infer_layout(self, cache_values: Any) -> tuple[tuple[Any, ...], Any]:
        """Output layouts and the :class:`~hyper_parallel.call.Solution`."""
        solution = self.solve(cache_values[0])
        return tuple(solution.outputs), solution

    def get_expand_impl(
        self, func: Callable[..., Any], infer_result: Any, cache_values: Any
    ) -> Callable[..., Any] | None:
        """The solution's local function."""
        return infer_result[1].local

    def positions(self, call: Call, names: Iterable[int | str]) -> frozenset[int]:
        """Input positions of names or positions; absent ones are left out."""
        found = (n if isinstance(n, int) else call.index(n) for n in names)
        return frozenset(p for p in found if p is not None)


class StrategyOp(LayoutOp):
    """A rule given by strategies."""

    def strategies(self, call: Call) -> Iterable[Strategy]:
        """The legal combinations for one mesh axis, in order of preference among equally cheap ones."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define strategies")

    def num_outputs(self, call: Call) -> int:
        """How many tensors the operator returns."""
        return 1

    def output_shapes(self, call: Call) -> Sequence[tuple[int, ...]] | None:
        """Global shape of each output, where that is cheaper to say than to run the function on meta tensors."""
        return None

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        """What runs on the local tensors, when the function itself is not right there: local sizes in the arguments, or
        communication inside."""
        return None

    def solve(self, call: Call) -> Solution:
        """Match the strategies per mesh axis, then jointly."""
        count = self.num_outputs(call)
        rows = _Rows(self, call, count)
        shapes = self.output_shapes(call)
        largest = 0 if shapes is None else max(math.prod(shape) for shape in shapes)
        chosen: list[Row] = []
        for axis in range(call.info.ndim):
            chosen.append(_choose(call, rows, axis, largest, chosen))
        targets, outputs = _joint(call, chosen, count)
        _check_policy(call, targets, rows)
        solution = Solution(
            targets,
            list(outputs),
            invariant=[row.invariant for row in chosen],
            uncounted=self.positions(call, self.uncounted),
            shapes=shapes,
        )
        solution.local = self.local_function(call, targets, outputs)
        return solution


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
            inputs: list[Placement] = [R] * len(call.inputs)
            for name, placement in strategy.inputs.items():
                call.check_name(name)
                index = call.index(name)
                if index is not None:
                    inputs[index] = placement
        elif len(strategy.inputs) > len(call.inputs):
            raise _wrong_count(call, strategy, f"{len(call.inputs)} tensor inputs")
        else:
            inputs = [*strategy.inputs, *[R] * (len(call.inputs) - len(strategy.inputs))]
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


class _Rows:
    """An operator's rows, made as they are asked for: most calls match one of the first."""

    def __init__(self, op: StrategyOp, call: Call, count: int) -> None:
        self.known: list[Row] = []
        self.more = self._make(op, call, count)

    @staticmethod
    def _make(op: StrategyOp, call: Call, count: int) -> Iterator[Row]:
        everything = False
        for strategy in op.strategies(call):
            row = Row.of(op, call, strategy, count)
            everything = everything or all(map(is_replicate, row.inputs))
            yield row
        if not everything:
            yield Row((R,) * len(call.inputs), (R,) * count, _NONE)

    def __iter__(self) -> Iterator[Row]:
        yield from self.known
        for row in self.more:
            self.known.append(row)
            yield row


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
        slots = [(i, p.dim) for i, p in enumerate(row.inputs) if is_shard(p)]
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
            packed = _like_anchor(call, row, axis, want) if is_shard(want) else want
            # Operands that are joined along a dim have other sizes there, and so no such sections.
            fits = operand < 0 or type(packed) is not PackedShard or sum(packed.sections) == sizes[operand][packed.dim]
            placements.append(packed if fits else want)
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


def _check_policy(call: Call, targets: Sequence[Layout], rows: Iterable[Row]) -> None:
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
