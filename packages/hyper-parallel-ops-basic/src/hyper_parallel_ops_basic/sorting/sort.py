"""Operators that need one dim whole and leave the others alone: sorting and its relatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hyper_parallel import Shard, Strategy
from hyper_parallel.rules import Call, OpSummary, R, S, WholeDims, normal_dim


class AlongDim(WholeDims):
    """``sort``, ``argsort``, ``kthvalue``, ``median``, ``mode`` and others along one dim.

    A sharded dim: the lines are dealt out to the ranks (one all-to-all there and one per output back; where the dim
    folds away, one all-gather of the results instead). Indices are global, as the lines are whole.

    Args:
        dim: the dim when none is given; None for all dims flattened, which gives the value alone.
    """

    summary = OpSummary(
        "every dim",
        communicates="sharded dim: 1 all-to-all in, 1 per output back (folded: 1 all-gather of the results) | the same",
    )

    def __init__(
        self, op_name: str, *, signature: str, dim: int | None = -1, outputs: int = 1, folds: bool = False
    ) -> None:
        super().__init__(op_name, signature=signature, outputs=outputs, folds=folds)
        self.default = dim

    def num_outputs(self, call: Call) -> int:
        return 1 if self._flattens(call) and self.folds else self.outputs

    def _flattens(self, call: Call) -> bool:
        return call.arg("dim", self.default) is None

    def whole_dims(self, call: Call) -> tuple[int, ...]:
        ndim = len(call.inputs[0].shape)
        given = call.arg("dim", self.default)
        return tuple(range(ndim)) if given is None else (normal_dim(given, ndim),)

    def on_lines(self, call: Call) -> Callable[..., Any]:
        func = getattr(torch, call.name)
        if self._flattens(call):
            # One line, on one rank; ties share its gradient, which they do not along a dim. Elsewhere nothing.
            return lambda lines, given: func(lines).reshape(1) if len(lines) else lines.sum(tuple(range(1, lines.ndim)))

        def along(lines: torch.Tensor, given: dict[str, Any]) -> Any:
            return func(lines, **{name: value for name, value in given.items() if name != "keepdim"} | {"dim": 1})

        return along


class Quantile(AlongDim):
    """``quantile`` and ``nanquantile`` of one or several ``q``, which come first in the result."""

    summary = OpSummary(
        "every dim",
        communicates="sharded folded dim: 1 all-to-all, 1 all-gather of the results | 1 all-to-all",
    )

    kernels_need_lines = True

    def __init__(self, op_name: str) -> None:
        super().__init__(
            op_name, signature="input, q, dim=None, keepdim=False, *, interpolation=linear", dim=None, folds=True
        )

    def strategies(self, call: Call) -> Iterable[Strategy]:
        leading = len(call.spec("q").shape) if call.index("q") is not None else 0
        for row in super().strategies(call):
            out = row.outputs
            yield Strategy({"input": row.inputs[0]}, S(out.dim + leading) if isinstance(out, Shard) else R)  # type: ignore[index]

    def on_lines(self, call: Call) -> Callable[..., Any]:
        func, several = call.func, call.index("q") is not None and bool(call.spec("q").shape)

        def along(lines: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            options = {name: value for name, value in given.items() if name in ("q", "interpolation")}
            if not len(lines):  # which the kernel does not take; nothing, that depends on both
                return lines.flatten(1).sum(1, keepdim=several) + given["q"]
            out = func(lines.flatten(1), dim=1, **options)
            return out.movedim(0, 1) if several else out

        return along

    def folded_form(self, call: Call, out: torch.Tensor) -> torch.Tensor:
        several = call.index("q") is not None and bool(call.spec("q").shape)
        return out.movedim(-1, 0) if several else out
