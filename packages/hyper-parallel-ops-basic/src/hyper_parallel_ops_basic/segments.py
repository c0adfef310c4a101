"""``segment_reduce``: runs of rows of different lengths, folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.call import Call, normal_dim
from hyper_parallel.families.empty_pieces import zeros_from
from hyper_parallel.layout import Layout
from hyper_parallel.op import OpSummary
from hyper_parallel.strategy import S, Strategy, StrategyOp


class SegmentReduce(StrategyOp):
    """``segment_reduce(data, reduce, lengths=..., offsets=..., axis=0)``: ``lengths`` has the dims of the data up to
    ``axis``, and there the lengths of the segments (``offsets``: where they begin, and the end)."""

    summary = OpSummary(
        "every dim but the segmented one, those before it with the lengths",
        whole="the segmented dim: a segment may lie on several ranks",
    )

    signature = "data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None"

    @staticmethod
    def _axis(call: Call) -> int:
        return normal_dim(call.arg("axis", 0), len(call.spec("data").shape))

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        shape, axis = list(call.spec("data").shape), self._axis(call)
        named = "lengths" if call.index("lengths") is not None else "offsets"
        shape[axis] = call.spec(named).shape[axis] - (named == "offsets")
        return [tuple(shape)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        axis = self._axis(call)
        for d in range(len(call.spec("data").shape)):
            if d < axis:
                yield Strategy({"data": S(d), "lengths": S(d), "offsets": S(d)}, S(d))
            elif d > axis:
                yield Strategy({"data": S(d)}, S(d))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        func, axis, (shape,) = call.func, self._axis(call), self.output_shapes(call)

        def local(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            before, after = data.shape[:axis], data.shape[axis + 1 :]
            nothing = 0 in before or 0 in after  # which the kernel does not take
            return zeros_from((*before, shape[axis], *after), data) if nothing else func(data, *args, **kwargs)

        return local
