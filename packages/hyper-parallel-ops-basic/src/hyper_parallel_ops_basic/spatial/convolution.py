"""Convolutions: batch, channels, groups, and positions, of which each rank fetches the few next to its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import Layout, PackedShard, Strategy, StrategyOp
from hyper_parallel.rules import Call, ExchangePlan, OpSummary, P, S, Solution, fit_rank, plain, zeros_from
from hyper_parallel_ops_basic.spatial.halo import Window

__all__ = ["Convolution"]


class SlidingKernel(StrategyOp):
    """What convolutions and transposed ones share; they differ in the channels' side of the weight.

    Args:
        rank: number of position dims.
    """

    summary = OpSummary(
        "samples, positions, output channels with the weight, groups; sharded input channels leave a pending sum",
        pending="passes through the input or through the weight, together with the bias",
        communicates="sharded positions: 1 all-to-all of the halo | the same",
        whole="channels that do not divide into whole groups, of which the kernel takes no parts",
    )

    def __init__(self, op_name: str, *, rank: int) -> None:
        super().__init__(op_name)
        self.rank = rank

    def channels(self, call: Call) -> int:
        """Which dim of the input the channels are: 0 without a batch, else 1."""
        return len(call.spec("input").shape) - self.rank - 1

    def channel_strategies(self, call: Call, channels: int) -> Iterable[Strategy]:
        """How channels may be sharded."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define channel_strategies")

    def strategies(self, call: Call) -> Iterable[Strategy]:
        channels = self.channels(call)
        if channels:
            yield Strategy({"input": S(0)}, S(0))
        yield from self.channel_strategies(call, channels)
        for d in range(channels + 1, len(call.spec("input").shape)):
            yield Strategy({"input": S(d)}, S(d))
        yield Strategy({"input": P, "bias": P}, P)
        yield Strategy({"weight": P, "bias": P}, P)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        solution.outputs = [self.output(solution.outputs[0], call)]
        return solution

    def output(self, layout: Layout | None, call: Call) -> Layout:
        """Layout of the result: positions lie plainly, in the order of the whole."""
        assert layout is not None
        ndim = len(call.spec("input").shape)
        return plain(fit_rank(layout, ndim), range(ndim - self.rank, ndim))

    def divides(self, call: Call, channels: int) -> bool:
        """Whether every rank gets whole groups, whichever axes shard them."""
        packed = is_packed(call.spec("input").layout, channels) or is_packed(call.spec("weight").layout, 0)
        return not packed and call.arg("groups", 1) % math.prod(call.info.shape) == 0


class Convolution(SlidingKernel):
    """``F.conv1d``, ``conv2d``, ``conv3d``: ``input [batch, in, *positions]``, ``weight [out, in / groups, *kernel]``.

    - Batch and, without groups, output channels: nothing is communicated. Input channels leave a pending sum.
    - With groups input and output channels are sharded together: always where each channel is a group of its own
      (depthwise), else where the number of groups divides by the number of ranks of the mesh.
    - Positions: one all-to-all brings what the kernel reads of the neighbours' (the halo), one takes the gradients
      back. Padding is that of the whole input, so it may be wider than a rank's piece.
    """

    signature = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"

    def output_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        x, weight = tuple(call.spec("input").shape), tuple(call.spec("weight").shape)
        channels = self.channels(call)
        if len(weight) != self.rank + 2 or channels not in (0, 1) or x[channels] != weight[1] * call.arg("groups", 1):
            return None  # PyTorch's own error, on meta tensors
        windows = self._windows(call)
        positions = [w.count(n) for w, n in zip(windows, x[channels + 1 :], strict=True)]
        return None if min(positions) < 1 else [(*x[:channels], weight[0], *positions)]

    def channel_strategies(self, call: Call, channels: int) -> Iterable[Strategy]:
        groups = call.arg("groups", 1)
        depthwise = call.spec("input").shape[channels] == call.spec("weight").shape[0] == groups
        if groups == 1:
            yield Strategy({"weight": S(0), "bias": S(0)}, S(channels))
            yield Strategy({"input": S(channels), "weight": S(1), "bias": P}, P)
        elif depthwise or self.divides(call, channels):
            yield Strategy({"input": S(channels), "weight": S(0), "bias": S(0)}, S(channels))

    def _windows(self, call: Call) -> list[Window]:
        """What an output position reads, for each position dim."""
        kernel = tuple(call.spec("weight").shape)[2:]
        stride, dilation = (each(call.arg(name, 1), self.rank) for name in ("stride", "dilation"))
        padding = call.arg("padding", 0)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            pads = [(t // 2, t - t // 2) for t in total]
        else:
            pads = [(p, p) for p in each(0 if padding == "valid" else padding, self.rank)]
        return [Window(*w) for w in zip(kernel, stride, dilation, pads, strict=True)]

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if all(layout.is_replicated() for layout in targets):
            return None
        windows = self._windows(call)
        layout, shape = targets[call.position("input")], tuple(call.spec("input").shape)
        output = self.output(outputs[0], call)
        channels = self.channels(call)
        moves: dict[int, ExchangePlan] = {}
        for i, window in enumerate(windows):
            d = channels + 1 + i
            if layout.shard_order[d]:
                moves[d] = window.halo(layout, output, shape[d], d)
                windows[i] = window.without_padding()
        groups, arguments = call.arg("groups", 1), self.arguments

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            for d, move in moves.items():
                x = move(x, d)
            own_groups = 1 if groups == 1 else x.shape[channels] // weight.shape[1]
            return _convolve(self.rank, x, weight, bias, windows, own_groups)

        return local


def _convolve(
    rank: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: list[Window], groups: int
) -> torch.Tensor:
    """The convolution of this rank's pieces, which may be empty."""
    positions = x.shape[-rank:]
    out = [max(w.count(n), 0) if n else 0 for w, n in zip(windows, positions, strict=True)]
    if not x.numel() or not weight.numel() or 0 in out:
        zeros = zeros_from((*x.shape[: -rank - 1], weight.shape[0], *out), x, weight)
        return zeros if bias is None else zeros + bias.view(-1, *[1] * rank)
    padding: Any = [w.pads[0] for w in windows]
    if any(left != right for left, right in (w.pads for w in windows)):
        x = F.pad(x, [n for w in reversed(windows) for n in w.pads])
        padding = 0
    convolve = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    strides, dilations = [w.stride for w in windows], [w.dilation for w in windows]
    return convolve(x, weight, bias, strides, padding, dilations, groups)


def each(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """A number for all position dims, or one for each."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * rank if len(given) == 1 else given


def is_packed(layout: Layout, dim: int) -> bool:
    return any(isinstance(layout.placements[a], PackedShard) for a in layout.shard_order[dim])
