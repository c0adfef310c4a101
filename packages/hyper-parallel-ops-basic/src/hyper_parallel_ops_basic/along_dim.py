"""Operators that need one dim whole and leave the others alone: sorting and its relatives."""

from __future__ import annotations

from collections.abc import Iterable

from hyper_parallel.call import Call, normal_dim
from hyper_parallel.strategy import S, Strategy, StrategyOp


class AlongDim(StrategyOp):
    """``topk``, ``sort``, ``argsort``, ``cumprod`` and others along one dim; every other dim may be sharded.

    Args:
        signature: parameter names, among them ``dim``.
        dim: the dim when none is given; None for all dims flattened.
        outputs: number of outputs.
        folds: whether the dim disappears (unless ``keepdim``).
    """

    def __init__(
        self, op_name: str, *, signature: str, dim: int | None = -1, outputs: int = 1, folds: bool = False
    ) -> None:
        self.signature = signature
        super().__init__(op_name)
        self.default, self.outputs, self.folds = dim, outputs, folds

    def num_outputs(self, call: Call) -> int:
        # median() and the like over everything return the value alone.
        return 1 if self.folds and call.arg("dim") is None and self.default is None else self.outputs

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ndim = len(call.inputs[0].shape)
        given = call.arg("dim", self.default)
        if given is None:
            return
        dim = normal_dim(given, ndim)
        gone = self.folds and not call.arg("keepdim", False)
        for d in range(ndim):
            if d != dim:
                yield Strategy([S(d)], S(d - (gone and d > dim)))
