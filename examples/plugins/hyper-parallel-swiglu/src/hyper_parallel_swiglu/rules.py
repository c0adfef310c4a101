"""How the operators behave on sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel import PackedShard, Strategy, StrategyOp
from hyper_parallel.rules import Call, S


class SwigluRule(StrategyOp):
    """``swiglu``: rows are independent; features too, if every rank has its part of the gate *and* of the up half.

    That is what ``PackedShard`` says. A plain ``Shard`` of the last dim would give the gate to one rank and the up half
    to another, so it is not listed, and the engine asks for a redistribution. No pending sum: ``silu`` is not linear.
    """

    signature = "gate_up"

    def strategies(self, call: Call) -> Iterator[Strategy]:
        *rows, last = range(call.inputs[0].layout.ndim)
        half = call.inputs[0].shape[last] // 2
        for d in rows:
            yield Strategy({"gate_up": S(d)}, S(d))
        yield Strategy({"gate_up": PackedShard(last, (half, half))}, S(last))
