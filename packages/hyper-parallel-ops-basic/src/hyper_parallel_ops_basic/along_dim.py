"""Operators that need one dim whole and leave the others alone: sorting and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.call import Call, normal_dim
from hyper_parallel.families.whole_dims import WholeDims


class AlongDim(WholeDims):
    """``sort``, ``argsort``, ``kthvalue``, ``median``, ``mode`` and others along one dim.

    A sharded dim: the lines are dealt out to the ranks (one all-to-all there and one per output back; where the dim
    folds away, one all-gather of the results instead). Indices are global, as the lines are whole.

    Args:
        dim: the dim when none is given; None for all dims flattened, which gives the value alone.
    """

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
