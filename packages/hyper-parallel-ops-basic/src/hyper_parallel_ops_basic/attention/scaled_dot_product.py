"""scaled_dot_product_attention: batch, heads and queries sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import Layout, PackedShard, Placement, Replicate, Strategy, StrategyOp
from hyper_parallel.rules import (
    NOT_VARYING,
    Call,
    OpSummary,
    OverAxes,
    P,
    R,
    S,
    box,
    broadcast_shape,
    global_indices,
    length,
    on_dim,
    shard_if_full,
    transition,
)
from hyper_parallel_ops_basic.normalization.softmax import softmax_over


class Attention(StrategyOp):
    """``F.scaled_dot_product_attention``: query ``[..., heads, queries, E]``, key and value ``[..., heads, keys, E]``.

    - Batch dims and heads are sharded alike everywhere; a mask follows where it is not broadcast.
    - Grouped heads (``enable_gqa``): key and value heads are sharded like the query's where that gives every rank whole
      groups, or stay whole, each rank taking the ones that its query heads need.
    - Queries are sharded with whole keys and values; a causal mask then becomes an explicit one of this rank's rows.
    - Values may be sharded along their features.
    - Keys and values are sharded alike with whole queries: the softmax is taken over the ranks (two small all-reduces),
      and the result is a pending sum. Where the queries are sharded by the same axes (context parallelism), keys and
      values are gathered, as every query needs all of them.

    Dropout draws the mask of the whole attention matrix on every rank, so that each element meets the fate that it has
    on one device with the same seed. That is exact where the device computes attention from matrices (CPU), and costs
    memory for that mask.
    """

    summary = OpSummary(
        "batch dims, heads (grouped ones too), queries, keys and values, features of values",
        communicates=(
            "sharded keys: 2 all-reduces of one number per row and a pending sum; with queries sharded alike 2 "
            "all-gathers, of keys and values | 2 reduce-scatters"
        ),
        whole="features of queries and keys",
    )

    signature = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False"
    floats_matter = True  # dropout_p

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        query, key, value = (tuple(call.spec(n).shape) for n in ("query", "key", "value"))
        if call.arg("enable_gqa"):
            key, value = query[:-2] + key[-2:], query[:-2] + value[-2:]
        return [(*broadcast_shape([query[:-2], key[:-2], value[:-2]]), query[-2], value[-1])]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        (out,) = self.output_shapes(call)
        grouped = bool(call.arg("enable_gqa"))
        heads = len(out) - 3
        for d in range(len(out) - 2):
            if d == heads and grouped:
                yield from self._grouped_rows(call, out)
            else:
                yield Strategy(self._row(call, out, d), S(d))
        rows = len(out) - 2
        yield Strategy(
            {"query": S(len(call.spec("query").shape) - 2), "attn_mask": self._mask(call, out, rows)}, S(rows)
        )
        yield Strategy({"value": S(len(call.spec("value").shape) - 1)}, S(len(out) - 1))
        keys: dict[str, Placement] = {n: S(len(call.spec(n).shape) - 2) for n in ("key", "value")}
        queries = {"query": S(len(call.spec("query").shape) - 2), "attn_mask": self._mask(call, out, rows)}
        if not any(isinstance(p, PackedShard) for spec in call.inputs for p in spec.layout.placements):
            # Of another length than the queries, they can have plain shards in common only.
            yield Strategy(keys | queries, S(rows))
        mask = call.spec("attn_mask").shape if call.index("attn_mask") is not None else ()
        columns = S(len(mask) - 1) if mask and mask[-1] == call.spec("key").shape[-2] else R
        yield Strategy(keys | {"attn_mask": columns}, P)

    def _row(self, call: Call, out: tuple[int, ...], d: int) -> dict[str, Placement]:
        row = {n: shard_if_full(call.spec(n).shape, d, out) for n in ("query", "key", "value")}
        return {**row, "attn_mask": self._mask(call, out, d)}

    def _mask(self, call: Call, out: tuple[int, ...], d: int) -> Placement:
        if call.index("attn_mask") is None:
            return R
        return shard_if_full(call.spec("attn_mask").shape, d, out)

    def _grouped_rows(self, call: Call, out: tuple[int, ...]) -> Iterable[Strategy]:
        d = len(out) - 3
        specs = [call.spec(n) for n in ("query", "key", "value")]
        mask = self._mask(call, out, d)
        axes = {a for spec in specs for a in spec.layout.shard_order[d]}
        ways = torch.Size(call.info.shape[a] for a in axes).numel()
        plain = all(type(spec.layout.placements[a]) in _PLAIN for spec in specs for a in axes)
        # On all axes alike, so that no rank has query heads whose key heads are elsewhere.
        if plain and specs[1].shape[d] % ways == 0 and any(spec.layout.shard_order[d] for spec in specs[1:]):
            yield Strategy({"query": S(d), "key": S(d), "value": S(d), "attn_mask": mask}, S(d))
        else:
            yield Strategy({"query": S(d), "attn_mask": mask}, S(d))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if all(layout.is_replicated() for layout in targets):
            return None
        at = {n: i for n in ("query", "key", "value", "attn_mask") if (i := call.index(n)) is not None}
        query, key = targets[at["query"]], targets[at["key"]]
        shape, key_shape = tuple(call.spec("query").shape), tuple(call.spec("key").shape)
        shared = frozenset(key.shard_order[-2]) & frozenset(query.shard_order[-2])
        seen = key.with_placements(dict.fromkeys(shared, Replicate()))  # what of the keys this rank looks at
        gathers = [gathering(targets[at[n]], shared, tuple(call.spec(n).shape)) for n in ("key", "value")]
        over = OverAxes(seen, [len(key_shape) - 2])
        causal = bool(call.arg("is_causal")) and bool(query.shard_order[-2] or seen.shard_order[-2])
        heads = self._heads(call, targets, at) if call.arg("enable_gqa") else None
        dropout = call.arg("dropout_p", 0.0) > 0
        pieces = [box(targets[i], tuple(call.inputs[i].shape), call.info.my_coordinate()) for i in at.values()]
        empty = any(not length(intervals) for piece in pieces for intervals in piece)
        if heads is None and not (causal or dropout or empty or shared or over):
            return None
        (out,) = self.output_shapes(call)
        weights = (*out[:-1], call.spec("key").shape[-2])
        # The attention weights are sharded as the output is, but for its features.
        layout = outputs[0].with_order(outputs[0].placements, (outputs[0].shard_order + ((),) * len(out))[: len(out)])
        layout = layout.with_placements(dict.fromkeys(layout.shard_order[-1], Replicate()))
        layout = layout.with_placements({a: on_dim(seen.placements[a], len(out) - 1) for a in seen.shard_order[-2]})
        arguments = self.arguments

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            if shared:
                given.update(key=gathers[0](given["key"]), value=gathers[1](given["value"]))
            if heads is not None:
                given.update({name: take(given[name]) for name, take in heads.items()}, enable_gqa=False)
            if causal:
                given.update(is_causal=False, attn_mask=_causal_rows(given, (query, shape), (seen, key_shape)))
            if dropout:
                return _from_matrices(given, _dropout_part(given, layout, weights), over)
            if over or empty:  # kernels do not take nothing; every input stays in the graph
                return _from_matrices(given, None, over)
            return F.scaled_dot_product_attention(**given)

        return local

    def _heads(
        self, call: Call, targets: Sequence[Layout], at: dict[str, int]
    ) -> dict[str, Callable[[torch.Tensor], torch.Tensor]] | None:
        """How this rank takes, from whole key and value heads, one for each of its query heads."""
        query, d = targets[at["query"]], targets[at["query"]].ndim - 3
        shape = tuple(call.spec("query").shape)
        if not query.shard_order[d] or targets[at["key"]].shard_order[d]:
            return None

        def taking(group: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda x: x.index_select(d, global_indices(query, shape, d, x.device) // group)

        return {name: taking(shape[d] // call.spec(name).shape[d]) for name in ("key", "value")}


_PLAIN = (type(S(0)), Replicate)


_Placed = tuple[Layout, tuple[int, ...]]


def _causal_rows(given: dict[str, Any], query: _Placed, key: _Placed) -> torch.Tensor:
    """The part of the causal mask that belongs to this rank's queries and keys: what is kept."""
    device = given["query"].device
    rows, columns = (global_indices(layout, shape, len(shape) - 2, device) for layout, shape in (query, key))
    return rows.unsqueeze(1) >= columns


def gathering(layout: Layout, axes: frozenset[int], shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function that makes this rank's keys (or values) whole over some axes, for queries of its own."""
    whole = layout.with_placements(dict.fromkeys(axes, Replicate()))
    return lambda x: transition(x, (layout, NOT_VARYING), (whole, axes), shape)


def _dropout_part(given: dict[str, Any], layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's part of the dropout factors of the whole attention matrix."""
    whole = F.dropout(torch.ones(shape, dtype=given["query"].dtype, device=given["query"].device), given["dropout_p"])
    for d, intervals in enumerate(box(layout, shape, layout.info.my_coordinate())):
        if layout.shard_order[d]:
            whole = torch.cat([whole.narrow(d, 0, 0), *(whole.narrow(d, a, b - a) for a, b in intervals)], d)
    return whole


def _from_matrices(given: dict[str, Any], dropout: torch.Tensor | None, over: OverAxes) -> torch.Tensor:
    """Attention as its definition has it, for what no kernel takes; ``over`` the axes that shard the keys, if any, of
    which each rank gives a term of the result."""
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if given.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = given.get("scale")
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if mask is not None:
        # A row in which nothing is kept gives zeros.
        empty = over.extreme((scores > -torch.inf).any(-1, keepdim=True).int(), "max") == 0
        weights = torch.where(empty, 0, softmax_over(torch.where(empty, 0, scores), over, scores.ndim - 1))
    else:
        weights = softmax_over(scores, over, scores.ndim - 1)
    return (weights if dropout is None else weights * dropout) @ value
