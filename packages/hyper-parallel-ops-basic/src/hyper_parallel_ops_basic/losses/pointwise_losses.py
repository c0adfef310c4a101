"""Losses that compare element by element: exact over uneven shards, as they divide by the global number of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Replicate, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, OverAxes, S, broadcast_shape, mean_term, shard_if_full
from hyper_parallel_ops_basic.losses.loss_reduction import reduction_of


class PointwiseLoss(StrategyOp):
    """``mse_loss`` and its like: any dims sharded; mean and sum leave a pending sum.

    Args:
        signature: parameter names of the function.
        weighted_mean: whether a mean with ``weight`` divides by the sum of weights, which is all-reduced with the sum.
    """

    summary = OpSummary(
        "every dim, operands alike; a mean or sum leaves a pending sum",
        communicates="none; a weighted mean 1 all-reduce of two numbers",
    )

    def __init__(self, op_name: str, *, signature: str, weighted_mean: bool = False) -> None:
        self.signature = signature
        super().__init__(op_name)
        self.weighted_mean = weighted_mean

    def _by_weights(self, call: Call) -> bool:
        return self.weighted_mean and call.index("weight") is not None and reduction_of(call.arg) == "mean"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        shapes = [spec.shape for spec in call.inputs]
        out, reduction = broadcast_shape(shapes), reduction_of(call.arg)
        for d in range(len(out)):
            left = S(d) if reduction == "none" else Replicate() if self._by_weights(call) else Partial()
            yield Strategy([shard_if_full(shape, d, out) for shape in shapes], left)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        reduction = reduction_of(call.arg)
        shapes = [spec.shape for spec in call.inputs]
        if reduction in ("none", "sum") or all(
            not layout.shard_order[d] for layout in targets for d in range(layout.ndim)
        ):
            return None
        out = torch.Size(broadcast_shape(shapes))
        count = call.spec("input").shape[0] if reduction == "batchmean" else out.numel()
        weight_at = call.index("weight")
        over = None
        if self._by_weights(call):
            layout = targets[weight_at or 0]
            over = OverAxes(layout, range(layout.ndim))
        arguments, func = self.arguments, call.func

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            given.update(size_average=None, reduce=None, reduction="none")
            losses = func(**{name: value for name, value in given.items() if name in arguments.names})
            if over is None:
                return mean_term(losses, tuple(range(losses.ndim)), False, count)
            total, weights = over.sum(torch.stack([losses.sum(), given["weight"].sum()]))
            return total / weights

        return local
