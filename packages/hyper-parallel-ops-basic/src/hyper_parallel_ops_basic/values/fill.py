"""Overwriting a whole tensor in place: ``copy_``, ``fill_``, ``zero_``. The target keeps its layout."""

from __future__ import annotations

from collections.abc import Iterable

from hyper_parallel import Partial, Strategy, StrategyOp
from hyper_parallel.rules import Call, LayoutOp, OpSummary, S, Solution, casts_by_term, shard_if_full
from hyper_parallel_ops_basic.indexing.setitem.setitem import neutral_of_number


class Copy(StrategyOp):
    """``x.copy_(source)``: the source, broadcast, is brought to the target's layout."""

    summary = OpSummary(
        "every dim of the target",
        pending="stays, with a pending source",
    )

    scalars_matter = False

    def strategies(self, call: Call) -> Iterable[Strategy]:
        shape, source = call.inputs[0].shape, call.inputs[1].shape
        for d in range(len(shape)):
            yield Strategy([S(d), shard_if_full(source, d, shape)], S(d))
        if not casts_by_term(call.inputs[1].dtype, call.inputs[0].dtype):
            return
        for pending in {p for p in call.inputs[0].layout.placements if isinstance(p, Partial)}:
            yield Strategy([pending, pending], pending)


class Fill(LayoutOp):
    """``fill_`` and ``zero_``: a pending sum gets the number once."""

    summary = OpSummary(
        "every dim",
        pending="stays: the number counts once",
    )

    scalars_matter = False

    def solve(self, call: Call) -> Solution:
        target = call.inputs[0].layout
        targets = [target]
        for spec in call.inputs[1:]:
            pending = {a: p for a, p in enumerate(target.placements) if isinstance(p, Partial)}
            targets.append(spec.layout.replicated().with_placements(pending))
        neutral = neutral_of_number(target)
        func = call.func
        if neutral is None or call.name == "zero_" or len(call.inputs) > 1:
            return Solution(targets, [target])
        return Solution(targets, [target], lambda x, *args, **kwargs: func(x, neutral))
