"""``F.pad``: dims that are not padded may be sharded."""

from __future__ import annotations

from collections.abc import Iterable

from hyper_parallel.call import Call
from hyper_parallel.strategy import P, S, Strategy, StrategyOp


class Pad(StrategyOp):
    """``F.pad(input, pad, mode, value)`` with every mode; padding with zeros is linear."""

    signature = "input, pad, mode=constant, value=None"
    floats_matter = True  # a pending sum passes when the value is zero

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ndim = len(call.spec("input").shape)
        pad = call.arg("pad")
        padded = {ndim - 1 - i // 2 for i, width in enumerate(pad) if width}
        for d in range(ndim):
            # A mode other than "constant" works on the trailing dims of an image and leaves the others alone.
            if d not in padded:
                yield Strategy([S(d)], S(d))
        if call.arg("mode", "constant") != "constant" or not call.arg("value"):
            yield Strategy([P], P)
