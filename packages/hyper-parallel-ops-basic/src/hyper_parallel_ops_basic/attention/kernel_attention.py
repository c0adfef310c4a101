"""Attention by fused kernels, each rank calling the kernel on its samples, heads or queries."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hyper_parallel import Layout, PackedShard, Placement, Shard, Strategy, StrategyOp
from hyper_parallel.rules import Call, S, Solution, dim_intervals
from hyper_parallel_ops_basic.attention.scaled_dot_product import gathering

__all__ = ["Arguments", "Change", "AttentionForm", "KernelAttention", "end_of_keys"]

Arguments = dict[str, Any]
Change = Callable[[Arguments], None]  # of a call's arguments, in place


@dataclass(frozen=True)
class AttentionForm:
    """How one call writes attention. Dims are those of query and keys; None where the kernel has to see all of it.

    Attributes:
        query: name of the argument with the queries.
        keys: names of those with keys and values.
        batch: dim of the samples.
        rows: dim of the queries, and of the keys: the tokens of one or of all sequences.
        heads: dim of the heads, counted from the end.
        counts: number of heads of the query, and of the keys (the first is a multiple).
        fused: whether that dim holds heads times features.
    """

    query: str
    keys: tuple[str, ...]
    batch: int | None
    rows: int | None
    heads: int | None
    counts: tuple[int, int]
    fused: bool = False


class KernelAttention(StrategyOp):
    """Attention by a kernel that takes whole keys, values and features.

    - Samples, with what else has them.
    - Heads: those of key and value go along, grouped ones where every rank gets whole groups. Whole grouped ones stay
      so, and each rank takes what its query heads need.
    - Queries, with whole keys; keys that are sharded alike are gathered, as every query needs all of them. Where a
      query sees keys up to its own place only, each rank's keys end at the last that it sees: kernels count a causal
      mask from the last query and key.
    """

    def form(self, call: Call) -> AttentionForm | None:
        """How this call writes attention; None where the kernel has to see everything."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define form")

    def beside(self, call: Call, part: str) -> dict[str, Placement]:
        """The other tensors that are sharded along with ``"batch"``, ``"rows"`` or ``"heads"``."""
        return {}

    def outputs(self, call: Call, part: str) -> Sequence[Placement]:
        """Placements of the outputs where that part is sharded."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define outputs")

    def localised(self, call: Call) -> Callable[[Arguments, int, int], None]:
        """What changes arguments of the whole call to those of queries ``start`` to ``stop``, in place."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define localised")

    def nothing(self, call: Call, given: Arguments) -> Any:
        """What a rank without queries returns, in the graph of its inputs: kernels do not take nothing."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define nothing")

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        form = self.form(call)
        if form is None or form.heads is None:
            return solution
        query, *keys = (solution.targets[call.position(name)] for name in (form.query, *form.keys))
        if any(key.shard_order[form.heads] for key in keys) and not _whole_groups(
            call, form, query.shard_order[form.heads]
        ):
            # Chosen axis by axis, more of them than the heads allow together.
            return self.solve_by(call, self.strategies(call, by_head=False))
        return solution

    def strategies(self, call: Call, by_head: bool = True) -> Iterable[Strategy]:
        """Rows for samples, heads (unless ``by_head`` is false) and queries."""
        form = self.form(call)
        if form is None:
            return
        names = (form.query, *form.keys)
        if form.batch is not None:
            yield Strategy(
                dict.fromkeys(names, S(form.batch)) | self.beside(call, "batch"), self.outputs(call, "batch")
            )
        if form.heads is not None and by_head:
            yield from self._head_rows(call, form, form.heads)
        beside = self.beside(call, "rows") if form.rows is not None else {}
        if form.rows is not None and not _packed(call, dict.fromkeys(names, S(form.rows)) | beside):
            queries, outputs = {form.query: S(form.rows)} | beside, self.outputs(call, "rows")
            yield Strategy(queries, outputs)
            yield Strategy(queries | dict.fromkeys(form.keys, S(form.rows)), outputs)

    def _head_rows(self, call: Call, form: AttentionForm, d: int) -> Iterable[Strategy]:
        specs = {name: call.spec(name) for name in (form.query, *form.keys)}
        on_heads = {name: S(d % len(spec.shape)) for name, spec in specs.items()}
        beside, outputs = self.beside(call, "heads"), self.outputs(call, "heads")
        if _packed(call, on_heads | beside):
            return
        may_be_whole = not form.fused and form.counts[0] != form.counts[1]
        if may_be_whole and not any(specs[name].layout.shard_order[d] for name in form.keys):
            yield Strategy({form.query: on_heads[form.query]} | beside, outputs)
        elif _whole_groups(call, form, {a for spec in specs.values() for a in spec.layout.shard_order[d]}):
            yield Strategy(on_heads | beside, outputs)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        form = self.form(call)
        if form is None or all(layout.is_replicated() for layout in targets):
            return None
        changes, func, arguments = self.changes(call, form, targets), call.func, self.arguments

        def local(*args: Any, **kwargs: Any) -> Any:
            given = arguments.bind(args, kwargs)
            for change in changes:
                change(given)
            return func(**given) if given[form.query].numel() else self.nothing(call, given)

        return local

    def changes(self, call: Call, form: AttentionForm, targets: Sequence[Layout]) -> list[Change]:
        """What makes of this rank's arguments those of its call of the kernel, in this order."""
        found = [*self._gathered(call, form, targets), *self._own_heads(call, form, targets)]
        query = targets[call.position(form.query)]
        if form.rows is not None and query.shard_order[form.rows]:
            start, stop = _only_interval(query, call.spec(form.query).shape, form.rows)
            localise = self.localised(call)
            found.append(lambda given: localise(given, start, stop))
        return found

    def _gathered(self, call: Call, form: AttentionForm, targets: Sequence[Layout]) -> Iterable[Change]:
        """Keys that are sharded by the axes of the queries are gathered."""
        if form.rows is None:
            return
        for name in form.keys:
            layout = targets[call.position(name)]
            axes = frozenset(layout.shard_order[form.rows])
            if axes:
                yield _applied(name, gathering(layout, axes, tuple(call.spec(name).shape)))

    def _own_heads(self, call: Call, form: AttentionForm, targets: Sequence[Layout]) -> Iterable[Change]:
        """From whole key heads this rank takes those of its query heads."""
        d = form.heads
        query = targets[call.position(form.query)]
        if d is None or not query.shard_order[d] or any(targets[call.position(n)].shard_order[d] for n in form.keys):
            return
        shape, group = call.spec(form.query).shape, form.counts[0] // form.counts[1]
        intervals = dim_intervals(query, tuple(shape), d % len(shape), call.info.my_coordinate())
        needed = [head // group for start, stop in intervals for head in range(start, stop)]
        groups = [(head, len(list(alike))) for head, alike in groupby(needed)]
        if len({count for _, count in groups}) == 1:  # groups of equal size are what kernels take
            needed = [head for head, _ in groups]
        for name in form.keys:
            yield _applied(name, lambda x: x.index_select(d, torch.tensor(needed, dtype=torch.long, device=x.device)))


def end_of_keys(of_queries: Sequence[int], of_keys: Sequence[int], stop: int) -> int:
    """Where the packed keys end that the queries before ``stop`` see, if each sees its sequence up to its own place;
    given where the sequences of both start, and the last ends."""
    sequence = bisect.bisect_left(of_queries, stop)  # the first that starts there or behind it
    if sequence == len(of_queries):
        return of_keys[-1]
    unseen = of_queries[sequence] - stop
    return max(of_keys[sequence] - unseen, of_keys[max(sequence - 1, 0)])


def _applied(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(given: Arguments) -> None:
        given[name] = function(given[name])

    return change


def _packed(call: Call, places: Mapping[str, Placement]) -> bool:
    """Whether one of these tensors is sharded section by section along the dim that its place names."""
    pairs = [(call.spec(name).layout.placements, place) for name, place in places.items()]
    return any(isinstance(p, PackedShard) and place == Shard(p.dim) for given, place in pairs for p in given)


def _whole_groups(call: Call, form: AttentionForm, axes: Iterable[int]) -> bool:
    """Whether every rank of these axes gets the key heads of its query heads, when both are sharded."""
    ways = math.prod(call.info.shape[a] for a in axes)
    heads, groups = form.counts
    return (heads == groups and not form.fused) or heads % ways == groups % ways == 0


def _only_interval(layout: Layout, shape: Sequence[int], d: int) -> tuple[int, int]:
    """First and last (exclusive) index along a dim that this rank holds; plain shards of shards are one interval."""
    intervals = dim_intervals(layout, tuple(shape), d, layout.info.my_coordinate())
    return intervals[0] if intervals else (shape[d], shape[d])
