"""Pooling: every rank fetches the few positions next to its own that its windows reach into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, P, S, Solution, plain, zeros_from
from hyper_parallel_ops_basic.spatial.convolution import each
from hyper_parallel_ops_basic.spatial.halo import Window

__all__ = ["Pool", "in_the_whole"]


class Pool(StrategyOp):
    """``max_pool`` and ``avg_pool`` over the last dims of ``[batch, channels, *positions]`` (or without the batch).

    Sharded positions: one all-to-all brings what the windows reach of the neighbours' (the halo), one takes the
    gradients back; nothing where no window crosses a border.

    Args:
        dims: number of position dims.
        average: whether it is the mean of a window, else the maximum.
    """

    signature = (
        "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False"  # of max_pool
    )

    def __init__(self, op_name: str, *, dims: int, average: bool = False) -> None:
        if average:
            self.signature = (
                "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, "
                "divisor_override=None"
            )
        super().__init__(op_name)
        self.dims, self.average = dims, average
        self.summary = OpSummary(
            "every dim",
            pending="passes" if average else "reduced first",
            communicates="sharded positions: 1 all-to-all of the halo | the same",
            whole="positions of whole numbers: the mean of a window is rounded once" if average else "",
        )

    def num_outputs(self, call: Call) -> int:
        return 2 if call.name.endswith("_with_indices") or (not self.average and call.arg("return_indices")) else 1

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ndim, exact = len(call.inputs[0].shape), not self.average or call.inputs[0].dtype.is_floating_point
        for d in range(ndim if exact else ndim - self.dims):
            yield Strategy([S(d)], S(d))
        if self.average and exact:
            yield Strategy([P], P)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        solution.outputs = [self._output(layout, call) for layout in solution.outputs]
        return solution

    def _output(self, layout: Layout | None, call: Call) -> Layout:
        """Layout of a result: positions lie plainly, in the order of the whole."""
        assert layout is not None
        ndim = len(call.inputs[0].shape)
        return plain(layout, range(ndim - self.dims, ndim))

    def windows(self, call: Call) -> list[Window]:
        """What a position of the result reads, for each position dim."""
        kernel = each(call.arg("kernel_size"), self.dims)
        stride = each(call.arg("stride") or kernel, self.dims)
        padding = each(call.arg("padding", 0), self.dims)
        dilation = each(1 if self.average else call.arg("dilation", 1), self.dims)
        ceil = bool(call.arg("ceil_mode", False))
        dims = zip(kernel, stride, dilation, padding, strict=True)
        return [Window(k, s, d, (p, p), ceil) for k, s, d, p in dims]

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        (layout,), output = targets, self._output(outputs[0], call)
        if not any(layout.shard_order):
            return None
        windows, shape = self.windows(call), tuple(call.inputs[0].shape)
        first = len(shape) - self.dims
        halos = {i: w for i, w in enumerate(windows) if layout.shard_order[first + i]}
        fill = 0 if self.average else _lowest(call.inputs[0].dtype)
        moves = {i: w.halo(layout, output, shape[first + i], first + i, fill) for i, w in halos.items()}
        starts = {i: w.starts(output, shape[first + i], first + i) for i, w in halos.items()}
        native = [w.without_padding() if i in halos else w for i, w in enumerate(windows)]
        share = self._share_of_kernel(call, halos, starts, shape[first:])
        func, arguments, count = call.func, self.arguments, self.num_outputs(call)

        def local(*args: Any, **kwargs: Any) -> Any:
            given = arguments.bind(args, kwargs)
            x = given.pop("input")
            for i, move in moves.items():
                x = move(x, first + i)
            sizes = [max(w.count(n), 0) if n else 0 for w, n in zip(native, x.shape[first:], strict=True)]
            if not x.numel() or 0 in sizes:
                zeros = zeros_from((*x.shape[:first], *sizes), x)
                return zeros if count == 1 else (zeros, torch.zeros_like(zeros, dtype=torch.int64))
            out = func(x, **given | {"padding": [w.pads[0] for w in native]})
            if count == 1:
                return out if share is None else out * share.to(out.device, out.dtype)
            begins = {i: int(at[0]) for i, at in starts.items()}
            return out[0], in_the_whole(out[1], x.shape[first:], shape[first:], begins)

        return local

    def _share_of_kernel(
        self, call: Call, halos: dict[int, Window], starts: dict[int, torch.Tensor], sizes: Sequence[int]
    ) -> torch.Tensor | None:
        """By what to multiply a mean over whole kernels where PyTorch divides by less; None: nowhere."""
        if not self.average or call.arg("divisor_override"):
            return None
        share = torch.ones((), dtype=torch.float64)
        padded = bool(call.arg("count_include_pad", True))
        for i, window in halos.items():
            before = window.pads[0] if padded else 0
            ends = (starts[i] + window.kernel).clamp(max=sizes[i] + before)
            counted = ends - starts[i].clamp(min=-before)
            view = [-1 if d == i else 1 for d in range(self.dims)]
            share = share * (window.kernel / counted).view(view)
        return None if bool((share == 1).all()) else share


def _lowest(dtype: torch.dtype) -> float:
    """What no maximum is, unless there is nothing else."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def in_the_whole(
    indices: torch.Tensor, sizes: Sequence[int], whole: Sequence[int], begins: dict[int, int]
) -> torch.Tensor:
    """Flat indices into planes of ``whole`` from those into the pieces of ``sizes`` that begin at ``begins``."""
    found, factor, rest = torch.zeros_like(indices), math.prod(whole), indices
    flat = math.prod(sizes)
    for i, (size, full) in enumerate(zip(sizes, whole, strict=True)):
        flat, factor = flat // size, factor // full
        found = found + (rest // flat + begins.get(i, 0)) * factor
        rest = rest % flat
    return found
