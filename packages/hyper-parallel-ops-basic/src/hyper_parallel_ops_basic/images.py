"""Operators over the trailing dims of images, on each channel by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.call import Call
from hyper_parallel.families.empty_pieces import zeros_from
from hyper_parallel.layout import Layout
from hyper_parallel.op import OpSummary
from hyper_parallel.strategy import S, Strategy, StrategyOp


class Planes(StrategyOp):
    """``max_unpool``: whole planes, each by itself, of ``[batch, channels, *positions]`` (or without the batch).

    Args:
        dims: number of position dims.
    """

    summary = OpSummary("samples, channels", whole="positions: the indices are those of whole planes")

    def __init__(self, op_name: str, *, signature: str, dims: int) -> None:
        self.signature = signature
        super().__init__(op_name)
        self.dims = dims

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.inputs[0].shape) - self.dims):
            yield Strategy([S(d)] * len(call.inputs), S(d))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        func, (shape,) = call.func, call.output_shapes()

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            planes = x.shape[: x.ndim - self.dims]
            return func(x, *args, **kwargs) if x.numel() else zeros_from((*planes, *shape[-self.dims :]), x)

        return local


class AffineGrid(StrategyOp):
    """``affine_grid(theta, size)``: a grid per sample."""

    summary = OpSummary(
        "samples",
        whole="the matrices: every point of a grid is a product with all of one",
    )

    signature = "theta, size, align_corners=None"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield Strategy({"theta": S(0)}, S(0))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if not targets[0].shard_order[0]:
            return None
        func, (_, *image), align = call.func, call.arg("size"), call.arg("align_corners")

        def local(theta: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # One sample more, as no sample is none that the function takes.
            more = torch.cat([theta, theta.new_zeros(1, *theta.shape[1:])])
            return func(more, [len(more), *image], align)[:-1]

        return local
