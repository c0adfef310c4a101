"""Operators that work element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any, Literal

import torch

from hyper_parallel._rules.call import Call
from hyper_parallel._rules.op import OpSummary
from hyper_parallel._rules.strategy import P, R, S, Strategy, StrategyOp
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial

Linear = Literal["no", "each", "sum", "first"]
Rising = Literal["no", "first", "max", "min"]
_SHARDS = "every dim, operands alike; broadcast dims stay whole"
_PENDING: dict[Linear, str] = {
    "no": "reduced first",
    "each": "passes through one factor",
    "sum": "passes when every tensor is pending; a number counts once",
    "first": "passes",
}
_EXTREME: dict[Rising, str] = {
    "no": "",
    "first": "; a max or min passes without gradient",
    "max": "; a max passes without gradient, a min in one operand",
    "min": "; a min passes without gradient, a max in one operand",
}


class Elementwise(StrategyOp):
    """Any number of tensors of broadcastable shapes to one tensor (or several of the same shape).

    Args:
        linear: how a pending sum passes.
            ``"no"``: not at all (``exp``, ``add`` of a number).
            ``"sum"``: when every tensor is pending (``add``, ``sub``); a Python number is then added on one rank only.
            ``"each"``: one tensor may be pending (``mul``).
            ``"first"``: the first tensor may be pending (``neg``, ``div``, casts).
        rising: how a pending max or min passes where no gradient is needed. Wherever it does, the result never falls
            as an operand grows, and is NaN where an operand is.
            ``"no"``: not at all.
            ``"first"``: the first tensor may be pending (``relu``, ``clamp``, ``exp``).
            ``"max"``: it is the larger of two: one may be pending, or both a max (``maximum``).
            ``"min"``: the smaller of two, likewise (``minimum``).
        outputs: number of output tensors.
    """

    scalars_matter = False

    def __init__(self, op_name: str, *, linear: Linear = "no", rising: Rising = "no", outputs: int = 1) -> None:
        super().__init__(op_name)
        self.linear, self.rising, self.outputs = linear, rising, outputs
        self.summary = OpSummary(_SHARDS, _PENDING[linear] + _EXTREME[rising])

    def num_outputs(self, call: Call) -> int:
        return self.outputs

    def strategies(self, call: Call) -> Iterable[Strategy]:
        shapes = [spec.shape for spec in call.inputs]
        out = broadcast_shape(shapes)
        for d in range(len(out)):
            inputs = [shard_if_full(shape, d, out) for shape in shapes]
            if any(p != R for p in inputs):
                yield Strategy(inputs, S(d))
        yield from self._pending(call, len(shapes))
        if self.rising != "no" and not any(call.needs_grad):
            yield from extremes(self.rising, len(shapes))

    def output_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        if any(spec.dtype.is_complex for spec in call.inputs):
            return None  # real and imag are views with a stride that no copy has
        return [broadcast_shape([spec.shape for spec in call.inputs])] * self.outputs

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if self.linear != "sum":
            return None
        numbers = [i for i, a in enumerate(call.args) if _is_number(a)]
        named = "other" in call.kwargs and _is_number(call.kwargs["other"])
        if not numbers and not named:
            return None
        # A number is a term of the sum: it counts once over the ranks that hold terms (of an average: on every rank).
        here = targets[0].info.my_coordinate()
        if all(here[axis] == 0 for axis, p in enumerate(targets[0].placements) if p == P):
            return None
        func = call.func

        def local(*args: Any, **kwargs: Any) -> Any:
            zeroed = [type(a)(0) if i in numbers else a for i, a in enumerate(args)]
            if named:
                kwargs["other"] = type(kwargs["other"])(0)
            return func(*zeroed, **kwargs)

        return local

    def _pending(self, call: Call, count: int) -> Iterable[Strategy]:
        """Rows for pending sums (and averages, which are sums of a fraction)."""
        for p in (P, Partial("avg")):
            if self.linear == "sum":
                yield Strategy([p] * count, p)
            elif self.linear == "each":
                for i in range(count):
                    yield Strategy([p if j == i else R for j in range(count)], p)
            elif self.linear == "first":
                yield Strategy([p], p)


def extremes(rising: Rising, count: int) -> Iterable[Strategy]:
    """Rows for pending maxima and minima of ``count`` tensors; see :class:`Elementwise`."""
    if rising in ("max", "min"):
        yield Strategy([Partial(rising)] * count, Partial(rising))
    for kind in (Partial("max"), Partial("min")):
        for i in range(1 if rising == "first" else count):
            yield Strategy([kind if j == i else R for j in range(count)], kind)


class Division(Elementwise):
    """``div``: linear in the numerator, unless the quotient is rounded."""

    def __init__(self, op_name: str) -> None:
        super().__init__(op_name, linear="first")
        self.summary = OpSummary(_SHARDS, "passes, unless the quotient is rounded")

    def _pending(self, call: Call, count: int) -> Iterable[Strategy]:
        return () if call.kwargs.get("rounding_mode") else super()._pending(call, count)


def broadcast_shape(shapes: list[Any]) -> tuple[int, ...]:
    """Shape that these broadcast to; PyTorch's own error when they do not."""
    if all(shape == shapes[0] for shape in shapes[1:]):
        return tuple(shapes[0])
    return tuple(torch.broadcast_shapes(*shapes))


def shard_if_full(shape: Any, d: int, out: tuple[int, ...]) -> Any:
    """Shard the operand's dim that becomes output dim ``d``, unless it is broadcast there."""
    own = d - (len(out) - len(shape))
    return S(own) if own >= 0 and shape[own] == out[d] else R


def _is_number(value: object) -> bool:
    """A term of the sum that is no tensor; NumPy's numbers are registered as such."""
    return isinstance(value, Number) or type(value).__name__ in ("bool", "bool_")
