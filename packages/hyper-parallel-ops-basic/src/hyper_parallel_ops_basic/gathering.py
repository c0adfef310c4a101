"""Reading elements by index along a dimension: ``index_select``, ``gather``.

From a tensor that is sharded along that dimension every rank takes what it holds, with zeros for the rest: a pending
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.call import Call
from hyper_parallel.families.held_indices import HeldIndices
from hyper_parallel.layout import Layout
from hyper_parallel.op import OpSummary
from hyper_parallel.placements import Partial
from hyper_parallel.strategy import P, S, Strategy, StrategyOp


def pending_of(call: Call, name: str) -> list[Partial]:
    """The kinds of pending reduction of an input."""
    found = {p for p in call.spec(name).layout.placements if isinstance(p, Partial)}
    return sorted(found, key=lambda p: p.reduce_op)


def pending_lookup(dtype: torch.dtype) -> Partial:
    """What a lookup leaves when each rank has zeros (False) for what others hold."""
    return Partial("max") if dtype is torch.bool else P


class IndexSelect(StrategyOp):
    """``index_select(input, dim, index)``."""

    summary = OpSummary(
        "every dim, and the index; the selected dim leaves a pending sum (bool: max)",
        pending="passes, of any kind",
    )

    signature = "input, dim, index"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        spec, index = call.spec("input"), call.spec("index")
        dim = call.dim("dim")
        assert dim is not None
        for d in range(len(spec.shape)):
            if d != dim:
                yield Strategy({"input": S(d)}, S(d))
        if len(index.shape) == 1:
            yield Strategy({"index": S(0)}, S(dim))
        for pending in pending_of(call, "input"):
            yield Strategy({"input": pending}, pending)
        if spec.shape:
            yield Strategy({"input": S(dim)}, pending_lookup(spec.dtype))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dim = call.dim("dim")
        assert dim is not None
        if not targets[0].ndim or not targets[0].shard_order[dim]:
            return None
        held = HeldIndices(targets[0], tuple(call.spec("input").shape), dim)
        parsed, look_up = self._parsed, self.look_up
        assert parsed is not None

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = parsed.bind(args, kwargs)
            return look_up(held, given["input"], given["index"], dim)

        return local

    @staticmethod
    def look_up(held: HeldIndices, x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
        """What this rank holds of the result, with zeros for the rest."""
        out, mine = held.read(x, index.reshape(-1), lambda piece, at: piece.index_select(dim, at))
        return out.masked_fill(~mine.view([-1 if d == dim else 1 for d in range(out.ndim)]), 0)


class Gather(IndexSelect):
    """``gather(input, dim, index)``."""

    summary = OpSummary(
        "every dim, and the index with it; the gathered dim leaves a pending sum (bool: max)",
        pending="passes, of any kind",
    )

    signature = "input, dim, index, *, sparse_grad=False"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        spec, index = call.spec("input"), call.spec("index")
        dim = call.dim("dim")
        assert dim is not None
        for d in range(len(spec.shape)):
            if d != dim and spec.shape[d] == index.shape[d]:
                yield Strategy({"input": S(d), "index": S(d)}, S(d))
        if index.shape:
            yield Strategy({"index": S(dim)}, S(dim))
        for pending in pending_of(call, "input"):
            yield Strategy({"input": pending}, pending)
        if spec.shape:
            yield Strategy({"input": S(dim)}, pending_lookup(spec.dtype))

    @staticmethod
    def look_up(held: HeldIndices, x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
        out, mine = held.read(x, index, lambda piece, at: piece.gather(dim, at))
        return out.masked_fill(~mine, 0)
