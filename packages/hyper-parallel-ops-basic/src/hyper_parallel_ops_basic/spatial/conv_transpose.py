"""Transposed convolutions: batch, channels, groups, and positions, of which each rank fetches what reaches its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import Layout, Strategy
from hyper_parallel.rules import Call, ExchangePlan, P, S, dim_intervals, zeros_from
from hyper_parallel_ops_basic.spatial.convolution import SlidingKernel, each

__all__ = ["ConvTranspose"]


class ConvTranspose(SlidingKernel):
    """``conv_transpose1d``, ``2d``, ``3d``: ``input [batch, in, *positions]``, ``weight [in, out / groups, *kernel]``.

    The same dims stay sharded as in a convolution, and the halo only runs the other way.
    """

    signature = "input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1"

    def channel_strategies(self, call: Call, channels: int) -> Iterable[Strategy]:
        if call.arg("groups", 1) == 1:
            yield Strategy({"weight": S(1), "bias": S(0)}, S(channels))
            yield Strategy({"input": S(channels), "weight": S(0), "bias": P}, P)
        elif self.divides(call, channels):
            yield Strategy({"input": S(channels), "weight": S(0), "bias": S(0)}, S(channels))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if all(layout.is_replicated() for layout in targets):
            return None
        layout, shape = targets[call.position("input")], tuple(call.spec("input").shape)
        output, (sizes,) = self.output(outputs[0], call), call.output_shapes()
        kernel = tuple(call.spec("weight").shape)[2:]
        stride, padding, dilation = (
            each(call.arg(name, default), self.rank)
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        channels, groups = self.channels(call), call.arg("groups", 1)
        parts = [
            _Spread(layout, output, channels + 1 + i, (shape[channels + 1 + i], sizes[channels + 1 + i]), *one)
            for i, one in enumerate(zip(kernel, stride, padding, dilation, strict=True))
        ]
        convolve, parsed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.rank - 1], self.arguments

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = parsed.bind(args, kwargs)
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            for part in parts:
                x = part.move(x, part.dim)
            own_groups = 1 if groups == 1 else groups * x.shape[channels] // shape[channels]
            if x.numel() and weight.numel():
                out = convolve(x, weight, None, stride, 0, 0, own_groups, dilation)
                out = F.pad(out, [n for part in reversed(parts) for n in part.margins])
            else:
                width = weight.shape[1] * (own_groups if groups > 1 else 1)
                out = zeros_from((*x.shape[:channels], width, *(part.count for part in parts)), x, weight)
            return out if bias is None else out + bias.view(-1, *[1] * self.rank)

        return local


class _Spread:
    """One position dim: which of the input's positions reach this rank's part of the result.

    Attributes:
        move: brings them here.
        margins: what is missing, or too much (negative), at both ends of what is made from them.
        count: length of this rank's part.
    """

    def __init__(
        self,
        layout: Layout,
        output: Layout,
        dim: int,
        sizes: tuple[int, int],
        kernel: int,
        stride: int,
        padding: int,
        dilation: int,
    ) -> None:
        self.dim = dim
        size, reach = sizes[0], dilation * (kernel - 1) + 1

        def bounds(coordinate: tuple[int, ...]) -> tuple[int, int]:
            """Of what the rank there makes of the result."""
            made = dim_intervals(output, (1,) * dim + (sizes[1],), dim, coordinate)
            return (made[0][0], made[-1][1]) if made else (0, 0)

        def wanted(coordinate: tuple[int, ...]) -> torch.Tensor:
            start, stop = bounds(coordinate)
            first = max(-((reach - 1 - start - padding) // stride), 0)
            last = min((stop - 1 + padding) // stride, size - 1)
            return torch.arange(first, max(last + 1, first)) if stop > start else torch.arange(0)

        self.move = ExchangePlan.along(layout, size, dim, wanted)
        here = layout.info.my_coordinate()
        mine, (start, stop) = wanted(here), bounds(here)
        self.count = stop - start
        begin = int(mine[0]) * stride - padding if len(mine) else start
        length = (len(mine) - 1) * stride + reach if len(mine) else 0
        self.margins = begin - start, stop - begin - length
