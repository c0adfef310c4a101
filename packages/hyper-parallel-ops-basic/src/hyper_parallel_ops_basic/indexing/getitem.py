"""Reading a part of a tensor: ``x[...]``, ``narrow``, ``select``.

A slice of a sharded dimension is a view, without communication, where the pieces that the ranks hold of it are what a
placement says (``x[8]`` over two ranks: ``x[2:6]`` is two and two). Otherwise (``x[:3]``) what crosses the ranks'
borders travels in one all-to-all, and the result is a copy. An int or index tensors on a sharded dimension read where
the elements are: a pending sum; index tensors that are sharded by the same mesh axes fetch their elements. A mask picks
as many elements as the data says, spread evenly over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Placement, Replicate, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    HeldIndices,
    OpSummary,
    R,
    S,
    Solution,
    contiguous_stride,
    fit_rank,
    in_memory_order,
    keep_range,
    local_shape,
    make_spec,
    memory_order,
    normal_dim,
    on_dim,
    one_row_more,
    pending_lookup,
    plain,
    wrap,
)
from hyper_parallel_ops_basic.indexing.exchange import IndexExchange, placed_along
from hyper_parallel_ops_basic.indexing.index import Index, Item, as_ids, asked_for, check_whole_ids, parts_of
from hyper_parallel_ops_basic.indexing.mask_positions import by_data
from hyper_parallel_ops_basic.indexing.sharded_masks import beside_of, leading, read_together, the_sharded_mask


class GetItem(StrategyOp):
    """``x[index]``."""

    summary = OpSummary(
        "every dim: slices stay in place or are spread anew, as masks are; ints and index tensors leave a pending sum",
        pending="passes, of any kind",
        communicates=(
            "slice that does not stay in place: 1 all-to-all of the elements that change rank | the same; mask: 1 or 2 "
            "all-gathers of counts and indices, 1 all-to-all | the same (beside it, index tensors that lie as what it "
            "picks: 1 all-to-all each); index tensor sharded as its dim: 1 all-gather of indices, 1 all-to-all of what "
            "they ask for | 1 all-to-all"
        ),
        whole="a second mask: only whole masks tell which of their elements go together",
    )

    makes_views = True
    clamps = True  # a range may end behind the last element

    def index(self, call: Call) -> Index:
        """The index in its one general form."""
        return Index(call.args[1], call.inputs[0].shape)

    carries_writes = True

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        args[0][self.shown(args, kwargs)] = value

    def shown(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The index of what the result shows."""
        return args[1]

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The parts of the index in a local call, which :class:`Item.where` numbers."""
        return parts_of(args[1])

    def strategies(self, call: Call) -> Iterable[Strategy]:
        index, spec = self.index(call), call.inputs[0]
        for dim, picked in index.ranges().items():
            if spec.layout.shard_order[dim] or len(picked) == spec.shape[dim]:
                yield Strategy([S(dim)], S(index.result.index(dim)))
        looked_up = pending_lookup(spec.dtype)
        for item in [*index.ints(), *index.tensors()]:
            yield Strategy([S(item.dim)], looked_up)
        lead = leading(call, index)
        for mask in index.masks():
            if mask is not lead:
                yield from (Strategy([S(d)], looked_up) for d in mask.dims)
        if lead is not None:
            yield from _mask_rows(index, lead, call)
        yield from _gather_rows(index, call)
        for pending in {p for p in spec.layout.placements if isinstance(p, Partial)}:
            yield Strategy([pending], pending)

    def solve(self, call: Call) -> Solution:
        index = self.index(call)
        solution = super().solve(call)
        target, output = solution.targets[0], solution.outputs[0]
        assert output is not None
        output = fit_rank(output, len(index.result))
        shape = tuple(call.inputs[0].shape)
        local = _Reading(index, target, shape, self.given)
        for dim, picked in index.ranges().items():
            if target.shard_order[dim]:
                output = local.keep(dim, picked, output)
        solution.outputs[0] = output
        sharded = [i for i in [*index.ints(), *index.tensors()] if target.shard_order[i.dim]]
        for item in sharded:
            if item.kind == "tensor" and item.ref is not None:
                exchange = IndexExchange(target, shape, item.dim, solution.targets[item.ref.index], item.value)
                if exchange:
                    local.exchanges[item.dim] = exchange
        local.held = {i.dim: HeldIndices(target, shape, i.dim) for i in sharded}
        copies = bool(local.moves or any(i.kind == "int" for i in sharded))
        solution.is_view, solution.copies = index.is_basic and not copies, index.is_basic and copies
        if any(i.ref is not None for i in index.ints()):
            solution.meta = lambda x, given: x[index.on_meta(given)]
        if index.has_mask:
            _solve_by_data(solution, call, index, local)
        elif local.differs(self.clamps) or (index.tensors() and local.is_empty):
            solution.local = local
        return solution


class _Reading:
    """What a rank does for ``x[index]`` on its piece."""

    def __init__(self, index: Index, target: Layout, shape: tuple[int, ...], given: Callable[..., Any]) -> None:
        self.index, self.target, self.shape, self.given = index, target, shape, given
        self.slices: dict[int, slice] = {}
        self.moves: dict[int, ExchangePlan] = {}
        self.held: dict[int, HeldIndices] = {}
        self.exchanges: dict[int, IndexExchange] = {}

    def differs(self, clamps: bool) -> bool:
        """Whether it is not what the function itself would do; one that ``clamps`` takes all of a piece when asked for
        all of the whole."""
        sliced = any(part != slice(None) for part in self.slices.values()) if clamps else bool(self.slices)
        return bool(self.moves or self.held) or sliced

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing."""
        return 0 in local_shape(self.target, self.shape, self.target.info.my_coordinate())

    def keep(self, dim: int, picked: range, output: Layout) -> Layout:
        """Take ``picked`` of a sharded dim; returns the result's layout."""
        at, size = self.index.result.index(dim), self.shape[dim]
        kept = keep_range(self.target, self.shape, dim, picked)
        if kept is None:
            output = plain(output, [at])
            self.moves[dim] = ExchangePlan.between(self.target, size, dim, output, at, torch.tensor(list(picked)))
            self.slices[dim] = slice(None)
            return output
        moved = {a: on_dim(p, at) for a, p in kept.placements.items()}
        placements = [moved.get(a, p) for a, p in enumerate(output.placements)]
        self.slices[dim] = slice(None) if len(picked) == size and picked.step > 0 else kept.local
        return output.with_order(tuple(placements), output.shard_order)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.read(args[0], self.given(args, kwargs))

    def read(self, x: torch.Tensor, given: Sequence[Any]) -> torch.Tensor:
        """The part of the result that this rank holds."""
        for dim, move in self.moves.items():
            x = in_memory_order(move(x, dim), memory_order(x.stride()))  # as a slice would have its dims
        where = [self._part(item, given) for item in self.index.items]
        if not x.numel():  # then the function looks at no index
            check_whole_ids(self.index, where, self.held)
        mine: torch.Tensor | None = None
        shares = False  # whether it is a view on this rank, which it must not be where it is none on others
        for at, item in enumerate(self.index.items):
            held = self.held.get(item.dim) if item.kind in ("int", "tensor") else None
            if held is None:
                continue
            if item.kind == "int":
                position = held.position(where[at])
                shares = position is not None
                if position is None:
                    x = one_row_more(x, item.dim)
                    position = x.shape[item.dim] - 1  # zeros
                where[at] = position
                continue
            ids = as_ids(where[at], x.device)
            ids = torch.where(ids < 0, ids + held.size, ids)
            if item.dim in self.exchanges:
                x, where[at], _ = self.exchanges[item.dim].read(x, ids)
                continue
            positions, here = held.find(ids)
            if x.shape[item.dim] == 0:
                x = one_row_more(x, item.dim)
            where[at] = positions
            mine = here if mine is None else mine & here
        out = x[tuple(where)]
        if mine is None:
            return out.clone() if shares and self.index.is_basic else out
        after = out.ndim - self.index.gathered.stop
        return out.masked_fill(~mine.view(*mine.shape, *[1] * after), 0)

    def _part(self, item: Item, given: Sequence[Any]) -> Any:
        cut = self.slices.get(item.dim) if item.kind == "range" else None
        return asked_for(item, self.shape, given) if cut is None else cut


def _gather_rows(index: Index, call: Call) -> Iterable[Strategy]:
    """Index tensors that are sharded alike, on a tensor that is not, or that is on the dim that one of them means."""
    fetches = _fetching(index, call)
    for place, size in enumerate(index.broadcast or ()):
        along = [(item, place - len(index.gathered) + len(item.value)) for item in index.tensors()]
        along = [(item, d) for item, d in along if d >= 0 and item.value[d] == size]
        if any(item.ref is None for item, _ in along):
            continue  # a list is the same on every rank
        dims = {item.ref.index: d for item, d in along if item.ref is not None}
        ways = {on_dim(p, 0): None for i, d in dims.items() for p in placed_along(call.inputs[i], d)}
        for spread in ways:
            inputs = [on_dim(spread, dims[i]) if i in dims else R for i in range(len(call.inputs))]
            out = on_dim(spread, index.gathered[place])
            yield Strategy(inputs, out)
            if fetches is not None and fetches.ref is not None and fetches.ref.index in dims:
                for have in placed_along(call.inputs[0], fetches.dim):
                    yield Strategy([have, *inputs[1:]], out)


def _mask_rows(index: Index, lead: Item, call: Call) -> Iterable[Strategy]:
    """Dims of the tensor that the mask ``lead`` reads, sharded with it: the elements that it picks are spread over the
    axes; the layout is known when they are."""
    beside = read_together(call, index, lead)
    for d in range(len(lead.value)):
        row: list[Placement] = [R] * len(call.inputs)
        row[0] = S(lead.dim + d)
        if lead.ref is not None:
            row[lead.ref.index] = S(d)
        for item in beside:
            row[item.ref.index] = S(len(item.value) - 1)  # type: ignore[union-attr]
        yield Strategy(row, S(index.picked))


def _fetching(index: Index, call: Call) -> Item | None:
    """The index tensor whose elements may be fetched: that of the only sharded dim of those that are looked up."""
    layout = call.inputs[0].layout
    found = [i for i in index.tensors() if layout.shard_order[i.dim]]
    return found[0] if len(found) == 1 else None


def _solve_by_data(solution: Solution, call: Call, index: Index, local: _Reading) -> None:
    """A mask: the result's shape is known only when it was computed, equally on all ranks."""
    base, target, dtype = solution.outputs[0], local.target, call.inputs[0].dtype
    assert base is not None
    lead = leading(call, index)
    together = [] if lead is None else read_together(call, index, lead)
    for at in [item.ref.index for item in together]:  # type: ignore[union-attr]
        solution.targets[at] = _by_axis(solution.targets[at])
    mask = the_sharded_mask(lead, target, local.shape)
    beside = beside_of(call, index, mask, solution.targets)
    if beside is not None:
        local.index = beside.index
        columns = [i.dim for i in beside.index.tensors() if target.shard_order[i.dim]]
        local.held |= {d: HeldIndices(target, local.shape, d) for d in columns}
    ranges = index.ranges()
    sizes = [None if source is None else len(ranges[source]) for source in index.result]

    def get(*args: Any, **kwargs: Any) -> Any:
        x, given = args[0], local.given(args, kwargs)
        layout, picked, is_one = base, None, False
        parts = list(given)
        if mask is None:
            parts = parts if beside is None else beside.whole_parts(parts, x.device)
        else:
            here = parts[mask.item.where or 0] = mask.here(given, x.device)
            picked = mask.picked(here)
            if beside is not None:
                parts, is_one = beside.parts(parts, here, picked)
            x = _with_zeros(x, mask.item.dims if is_one else ())
        out = local.read(x, parts)
        shape = [size if n is None else n for size, n in zip(out.shape, sizes, strict=True)]
        if picked is not None and is_one:
            layout = base.with_placements(dict.fromkeys(picked.over.axes, pending_lookup(dtype)))
        elif picked is not None:
            out, shape[index.picked] = picked.spread(out, index.picked), picked.total
            layout = picked.layout_of(base, out.ndim, index.picked)
        stride = contiguous_stride(shape)
        if any(spec.memory_order is not None for spec in call.inputs):
            stride = call.inputs[0].meta[index.with_picked(given, shape[index.picked])].stride()
        return _wrapped(out, layout, shape, stride, call.inputs[0].varying)

    solution.local, solution.meta = get, by_data


def _with_zeros(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The tensor with one row of zeros more along these dims: where the ranks look that do not hold an element."""
    for d in dims:
        x = one_row_more(x, d)
    return x


def _wrapped(
    out: torch.Tensor, layout: Layout, shape: Sequence[int], stride: Sequence[int], varying: frozenset[int]
) -> torch.Tensor:
    """This rank's part of a result whose layout only the data tells; it is varying where it is Replicate still."""
    still = frozenset(a for a in varying if isinstance(layout.placements[a], Replicate))
    spec = make_spec(layout, tuple(shape), tuple(stride), out.dtype, still)
    return wrap(in_memory_order(out, spec.memory_order), spec)


def _by_axis(layout: Layout) -> Layout:
    """The layout with the mesh axes of the last dim in their order, whatever it is for the mask."""
    return layout.with_order(layout.placements, (*layout.shard_order[:-1], tuple(sorted(layout.shard_order[-1]))))


class Narrow(GetItem):
    """``narrow(x, dim, start, length)``."""

    summary = OpSummary(
        "every dim: slices stay in place or are spread anew",
        pending="passes, of any kind",
        communicates="slice that does not stay in place: 1 all-to-all of the elements that change rank | the same",
    )

    signature = "input, dim, start, length"
    clamps = False

    def index(self, call: Call) -> Index:
        shape = call.inputs[0].shape
        dim, start, length = call.dim("dim"), int(call.numbers("start")), int(call.arg("length"))
        assert dim is not None
        start = start + shape[dim] if start < 0 else start
        if not 0 <= start <= start + length <= shape[dim]:
            raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({shape[dim]}).")
        return Index((slice(None),) * dim + (slice(start, start + length),), shape)

    def shown(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = self.arguments.bind(args, kwargs)
        dim, start, ndim = given["dim"], int(given["start"]), args[0].ndim
        start = start + args[0].shape[dim] if start < 0 else start
        return (slice(None),) * normal_dim(dim, ndim) + (slice(start, start + given["length"]),)

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return ()


class Select(Narrow):
    """``select(x, dim, index)``."""

    summary = OpSummary("every dim; a sharded dim that is selected leaves a pending sum", pending="passes, of any kind")

    signature = "input, dim, index"

    def index(self, call: Call) -> Index:
        dim = call.dim("dim")
        assert dim is not None
        return Index((slice(None),) * dim + (int(call.numbers("index")),), call.inputs[0].shape)

    def shown(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = self.arguments.bind(args, kwargs)
        return (slice(None),) * normal_dim(given["dim"], args[0].ndim) + (int(given["index"]),)
