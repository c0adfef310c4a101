"""scaled_dot_product_attention: batch, heads and queries sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.boxes import box, length
from hyper_parallel.call import Call
from hyper_parallel.families.elementwise import broadcast_shape, shard_if_full
from hyper_parallel.families.over_axes import global_indices
from hyper_parallel.layout import Layout
from hyper_parallel.placements import Placement, Replicate
from hyper_parallel.strategy import R, S, Strategy, StrategyOp


class Attention(StrategyOp):
    """``F.scaled_dot_product_attention``: query ``[..., heads, queries, E]``, key and value ``[..., heads, keys, E]``.

    - Batch dims and heads are sharded alike everywhere; a mask follows where it is not broadcast.
    - Grouped heads (``enable_gqa``): key and value heads are sharded like the query's where that gives every rank whole
      groups, or stay whole, each rank taking the ones that its query heads need.
    - Queries are sharded with whole keys and values; a causal mask then becomes an explicit one of this rank's rows.
    - Values may be sharded along their features.
    - Sharded keys need an exchange between the ranks (context parallelism) and are redistributed, or refused.

    Dropout draws the mask of the whole attention matrix on every rank, so that each element meets the fate that it has
    on one device with the same seed. That is exact where the device computes attention from matrices (CPU), and costs
    memory for that mask.
    """

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
        query = targets[at["query"]]
        shape = tuple(call.spec("query").shape)
        causal = bool(call.arg("is_causal")) and bool(query.shard_order[-2])
        heads = self._heads(call, targets, at) if call.arg("enable_gqa") else None
        dropout = call.arg("dropout_p", 0.0) > 0
        pieces = [box(targets[i], tuple(call.inputs[i].shape), call.info.my_coordinate()) for i in at.values()]
        empty = any(not length(intervals) for piece in pieces for intervals in piece)
        if heads is None and not causal and not dropout and not empty:
            return None
        (out,) = self.output_shapes(call)
        weights = (*out[:-1], call.spec("key").shape[-2])
        # The attention weights are sharded as the output is, but for its features.
        layout = outputs[0].with_order(outputs[0].placements, (outputs[0].shard_order + ((),) * len(out))[: len(out)])
        layout = layout.with_placements(dict.fromkeys(layout.shard_order[-1], Replicate()))
        parsed = self._parsed

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = parsed.bind(args, kwargs)  # type: ignore[union-attr]
            if heads is not None:
                given.update({name: take(given[name]) for name, take in heads.items()}, enable_gqa=False)
            if causal:
                given.update(is_causal=False, attn_mask=_causal_rows(given, query, shape))
            if dropout:
                return _from_matrices(given, _dropout_part(given, layout, weights))
            if empty:
                return _from_matrices(given, None)  # kernels do not take nothing; every input stays in the graph
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


def _causal_rows(given: dict[str, Any], layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """The rows of the causal mask that belong to this rank's queries, as a mask to add or to keep."""
    rows = global_indices(layout, shape, len(shape) - 2, given["query"].device)
    columns = torch.arange(given["key"].shape[-2], device=rows.device)
    return rows.unsqueeze(1) >= columns


def _dropout_part(given: dict[str, Any], layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's part of the dropout factors of the whole attention matrix."""
    whole = F.dropout(torch.ones(shape, dtype=given["query"].dtype, device=given["query"].device), given["dropout_p"])
    for d, intervals in enumerate(box(layout, shape, layout.info.my_coordinate())):
        if layout.shard_order[d]:
            whole = torch.cat([whole.narrow(d, 0, 0), *(whole.narrow(d, a, b - a) for a, b in intervals)], d)
    return whole


def _from_matrices(given: dict[str, Any], dropout: torch.Tensor | None) -> torch.Tensor:
    """Attention as its definition has it, for what no kernel takes."""
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
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.where(empty, 0, torch.where(empty, 0, scores).softmax(-1))
    else:
        weights = scores.softmax(-1)
    return (weights if dropout is None else weights * dropout) @ value
