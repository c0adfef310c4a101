"""Looking up a table of vectors: ``F.embedding``.

A table that is sharded along the vocabulary is looked up where the rows are: every rank fills in the vectors that it
holds and zeros for the others, a pending sum that the next operator reduces (or reduce-scatters for sequence parallel).
Ids that are sharded by the same mesh axes fetch their rows (:mod:`hyper_parallel_ops_basic.indexing.exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import Layout, Shard, Strategy, StrategyOp
from hyper_parallel.rules import Call, HeldIndices, OpSummary, P, S, refuse
from hyper_parallel_ops_basic.indexing.exchange import IndexExchange, placed_along


class Embedding(StrategyOp):
    """``F.embedding(input, weight, ...)``; weight is ``[vocabulary, hidden]``.

    ``max_norm`` changes the table by the ids that a rank sees, ``scale_grad_by_freq`` counts them, and ``sparse`` gives
    a gradient that cannot be redistributed: with these, placements under which a rank sees only some ids are refused.
    """

    summary = OpSummary(
        "ids, features; a sharded vocabulary leaves a pending sum where the ids are whole",
        pending="passes through the table",
        communicates="ids and vocabulary sharded by one axis: 1 all-gather of ids, 1 all-to-all of rows | 1 all-to-all",
        whole="`max_norm`, `sparse`: they change the table by the ids that a rank sees",
    )

    signature = "input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ids = call.spec("input").shape
        counts = bool(call.arg("scale_grad_by_freq"))
        whole_rows = call.arg("max_norm") is not None
        sparse = bool(call.arg("sparse"))
        if not (counts or whole_rows or sparse):
            for d in range(len(ids)):
                yield Strategy({"input": S(d)}, S(d))
            yield Strategy({"weight": P}, P)
            yield Strategy({"weight": S(0)}, P)
            for have in placed_along(call.spec("weight"), 0):
                for d in range(len(ids)):
                    for spread in placed_along(call.spec("input"), d):
                        yield Strategy({"input": spread, "weight": have}, spread)
        if not (whole_rows or sparse):
            yield Strategy({"weight": S(1)}, S(len(ids)))
        elif any(isinstance(p, Shard) for spec in call.inputs for p in spec.layout.placements):
            word = "max_norm" if whole_rows else "sparse=True"
            if call.mode.policy != "auto":
                raise refuse(
                    call,
                    f"{word} needs the whole table and all ids on every rank",
                    f"leave out {word}, or redistribute",
                )

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        weight = call.index("weight")
        assert weight is not None
        if not targets[weight].shard_order[0]:
            return None
        shape = tuple(call.spec("weight").shape)
        held = HeldIndices(targets[weight], shape, 0)
        padding, whole_padding = call.arg("padding_idx"), None
        if padding is not None:
            if not -shape[0] <= padding < shape[0]:
                raise AssertionError("Padding_idx must be within num_embeddings")
            padding = held.position(padding % shape[0])
            whole_padding = call.arg("padding_idx") % shape[0]
        arguments, ids = self.arguments, call.position("input")
        exchange = IndexExchange(targets[weight], shape, 0, targets[ids], tuple(call.inputs[ids].shape))

        def look_up(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = arguments.bind(args, kwargs)
            if exchange:
                rows, at, numbers = exchange.read(bound["weight"], bound["input"])
                unused = None if whole_padding is None else (numbers == whole_padding).nonzero()
                return F.embedding(at, rows, int(unused) if unused is not None and len(unused) else None)
            out, mine = held.read(bound["weight"], bound["input"], lambda table, at: F.embedding(at, table, padding))
            return out.masked_fill(~mine.unsqueeze(-1), 0)

        return look_up
