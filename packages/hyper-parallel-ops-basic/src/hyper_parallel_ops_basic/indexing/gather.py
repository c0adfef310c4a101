"""Reading elements by index along a dimension: ``index_select``, ``gather``.

From a tensor that is sharded along that dimension every rank takes what it holds, with zeros for the rest: a pending
sum. An index that is sharded by the same mesh axes fetches its elements (:mod:`.exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Strategy, StrategyOp
from hyper_parallel.rules import Call, ExchangePlan, HeldIndices, OpSummary, S, on_dim, pending_lookup
from hyper_parallel_ops_basic.indexing.exchange import IndexExchange, placed_along
from hyper_parallel_ops_basic.indexing.lookup import Lookup


def pending_of(call: Call, name: str) -> list[Partial]:
    """The kinds of pending reduction of an input."""
    found = {p for p in call.spec(name).layout.placements if isinstance(p, Partial)}
    return sorted(found, key=lambda p: p.reduce_op)


def fetching_rows(call: Call, dim: int, index_dim: int, out: int) -> Iterable[Strategy]:
    """``dim`` of the input and a dim of the index sharded together, where the index fetches what it asks for."""
    for have in placed_along(call.spec("input"), dim):
        for spread in placed_along(call.spec("index"), index_dim):
            yield Strategy({"input": have, "index": spread}, on_dim(spread, out))


class IndexSelect(StrategyOp):
    """``index_select(input, dim, index)``."""

    summary = OpSummary(
        "every dim, and the index; the selected dim leaves a pending sum (bool: max) where the index is whole",
        pending="passes, of any kind",
        communicates=(
            "dim and index sharded by one axis: 1 all-gather of indices, 1 all-to-all of what they ask for | "
            "1 all-to-all"
        ),
    )

    signature = "input, dim, index"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        spec, index = call.spec("input"), call.spec("index")
        dim = call.dim("dim")
        assert dim is not None
        for d in range(len(spec.shape)):
            if d != dim:
                yield Strategy({"input": S(d)}, S(d))
        if len(index.shape) == 1 and spec.shape:
            yield Strategy({"index": S(0)}, S(dim))
        for pending in pending_of(call, "input"):
            yield Strategy({"input": pending}, pending)
        if spec.shape:
            yield Strategy({"input": S(dim)}, pending_lookup(spec.dtype))
        if spec.shape and index.shape:
            yield from fetching_rows(call, dim, 0, dim)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dim, alignments = call.dim("dim"), self.alignments(call, targets)
        assert dim is not None
        is_spread = bool(targets[0].ndim and targets[0].shard_order[dim])
        if not is_spread and not alignments:
            return None
        shape, where = tuple(call.spec("input").shape), call.position("index")
        exchange = IndexExchange(targets[0], shape, dim, targets[where], tuple(call.inputs[where].shape))
        held = HeldIndices(targets[0], shape, dim)
        arguments, layout, take, look_up = self.arguments, targets[0], self.take, self.look_up

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            x, index = given["input"], given["index"]
            for d, move in alignments:
                x = move(x, d)
            if not is_spread:
                return take(x, dim, index)
            if exchange:
                rows, at, _ = exchange.read(x, index)
                return take(rows, dim, at)
            return look_up(x, index, held, layout)

        return local

    def alignments(self, call: Call, targets: Sequence[Layout]) -> list[tuple[int, ExchangePlan]]:
        """Along which other dims elements of the input have to travel first: each rank needs those beside its index."""
        return []

    @staticmethod
    def take(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        """The operator itself."""
        return x.index_select(dim, index.reshape(-1))

    @staticmethod
    def look_up(x: torch.Tensor, index: torch.Tensor, held: HeldIndices, layout: Layout) -> torch.Tensor:
        """What this rank holds of the result, with zeros for the rest; ``x`` is its piece of a tensor of ``layout``."""
        return held.select(x, index)


class Gather(IndexSelect):
    """``gather(input, dim, index)``."""

    summary = OpSummary(
        "every dim, and the index with it; the gathered dim leaves a pending sum (bool: max) where the index is whole",
        pending="passes, of any kind",
        communicates=(
            "dim and index sharded by one axis: as `index_select`; index that is smaller along another sharded dim: 1 "
            "all-to-all of the input's elements beside it | the same"
        ),
    )

    signature = "input, dim, index, *, sparse_grad=False"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        spec, index = call.spec("input"), call.spec("index")
        dim = call.dim("dim")
        assert dim is not None
        if 0 in index.shape and len(index.shape) != len(spec.shape):  # which PyTorch takes, as nothing is read
            yield from (Strategy({"index": S(d)}, S(d)) for d in range(len(index.shape)))
            return
        for d in range(len(spec.shape)):
            if d != dim:
                yield Strategy({"input": S(d), "index": S(d)}, S(d))
                if spec.shape[d] != index.shape[d]:
                    yield Strategy({"index": S(d)}, S(d))
        if index.shape:
            yield Strategy({"index": S(dim)}, S(dim))
        for pending in pending_of(call, "input"):
            yield Strategy({"input": pending}, pending)
        if spec.shape:
            yield Strategy({"input": S(dim)}, pending_lookup(spec.dtype))
        if spec.shape and index.shape:
            yield from fetching_rows(call, dim, dim, dim)

    def alignments(self, call: Call, targets: Sequence[Layout]) -> list[tuple[int, ExchangePlan]]:
        have, want = targets[0], targets[call.position("index")]
        shape, sizes = tuple(call.inputs[0].shape), tuple(call.spec("index").shape)
        if len(sizes) != len(shape):
            return []
        less = [d for d, size in enumerate(sizes) if d != call.dim("dim") and size != shape[d] and want.shard_order[d]]
        return [(d, ExchangePlan.between(have, shape[d], d, want, d, torch.arange(sizes[d]))) for d in less]

    @staticmethod
    def take(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        return x.gather(dim, index)

    @staticmethod
    def look_up(x: torch.Tensor, index: torch.Tensor, held: HeldIndices, layout: Layout) -> torch.Tensor:
        return Lookup.apply(x, held.dim, *held.find(index), layout)
