"""``F.interpolate``: every rank fetches the few positions next to its own that its part of the result is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    OpSummary,
    P,
    S,
    Solution,
    dim_intervals,
    fit_rank,
    indices_of,
    plain,
    wide,
    zeros_from,
)

__all__ = ["Interpolate"]

_NEAREST = ("nearest", "nearest-exact")
_LINEAR = ("linear", "bilinear", "trilinear")


class Interpolate(StrategyOp):
    """``interpolate(input, size, scale_factor, mode, ...)`` of ``[batch, channels, *positions]``.

    Every mode works on one position dim after the other, along which each element of the result is a weighted sum of a
    few of the input's: :class:`_Taps`.
    """

    summary = OpSummary(
        "every dim",
        pending="passes",
        communicates="sharded positions: 1 all-to-all of those that the result is made from | the same",
        whole="positions of whole numbers but in the nearest modes: they are rounded once, in the plane",
    )

    signature = (
        "input, size=None, scale_factor=None, mode=nearest, align_corners=None, recompute_scale_factor=None, "
        "antialias=False"
    )
    floats_matter = True  # a scale factor

    def strategies(self, call: Call) -> Iterable[Strategy]:
        floats = call.inputs[0].dtype.is_floating_point
        for d in range(len(call.inputs[0].shape)):
            if d < 2 or floats or call.arg("mode", "nearest") in _NEAREST:
                yield Strategy([S(d)], S(d))
        if floats:
            yield Strategy([P], P)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        (output,) = solution.outputs
        assert output is not None
        solution.outputs = [plain(output, range(2, len(call.inputs[0].shape)))]
        return solution

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        (layout,), (sizes,), arguments = targets, call.output_shapes(), self.arguments
        if not any(layout.shard_order):
            return None
        positions = range(2, len(sizes))
        if not any(layout.shard_order[d] for d in positions):
            func = call.func

            def whole_planes(*args: Any, **kwargs: Any) -> torch.Tensor:
                x = arguments.bind(args, kwargs)["input"]
                return func(*args, **kwargs) if x.numel() else zeros_from((*x.shape[:2], *sizes[2:]), x)

            return whole_planes
        output = plain(outputs[0], positions)
        resize = _Resize(call, sizes)
        taps = [_Taps(resize.weights(d), layout, output, d, (resize.shape[d], sizes[d])) for d in positions]

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = arguments.bind(args, kwargs)["input"]
            dtype = x.dtype
            for weighted_sums in taps:
                x = weighted_sums(x)
            return x.to(dtype)

        return local


class _Resize:
    """What one call does to the position dims."""

    def __init__(self, call: Call, sizes: Sequence[int]) -> None:
        self.func, self.shape, self.sizes = call.func, tuple(call.inputs[0].shape), sizes
        self.mode, antialias = call.arg("mode", "nearest"), bool(call.arg("antialias", False))
        self.two_taps = self.mode in _LINEAR and not antialias
        self.options = {"mode": self.mode, "align_corners": call.arg("align_corners"), "antialias": antialias}
        scale = call.arg("scale_factor")
        self.scales: list[float] | None = None  # where they, and not the sizes, say where elements lie
        if scale is not None and not call.arg("recompute_scale_factor") and self.mode != "area":
            self.scales = list(scale) if isinstance(scale, (list, tuple)) else [scale] * (len(self.shape) - 2)

    def weights(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each element along ``dim`` of the result the elements of the input that it is made from, and how much of
        each: two tensors ``[size of the result, number of elements]``, the second in float64."""
        if self.mode in _NEAREST or self.two_taps:
            # A ramp keeps its slope, so its values are positions.
            where = self._along(torch.arange(self.shape[dim], dtype=torch.float64).unsqueeze(0), dim)[0]
            first = where.floor().long()
            if self.mode in _NEAREST:
                return first.unsqueeze(1), torch.ones_like(where).unsqueeze(1)
            part = where - first
            both = torch.stack([first, (first + 1).clamp(max=self.shape[dim] - 1)], 1)
            return both, torch.stack([1 - part, part], 1)
        matrix = self._along(torch.eye(self.shape[dim], dtype=torch.float64), dim).t()
        used = int((matrix != 0).sum(1).max())
        index = (matrix != 0).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :used]
        return index, matrix.gather(1, index)

    def _along(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Rows of elements along ``dim`` resized as PyTorch does it."""
        # The other dims have two elements, and keep them: with one of them, PyTorch's antialiasing on CPU gives every
        # row the values of the first.
        sizes = [len(rows), 1, *(self.shape[dim] if d == dim else 2 for d in range(2, len(self.shape)))]
        images = rows.view([n if d in (0, dim) else 1 for d, n in enumerate(sizes)]).expand(sizes).contiguous()
        if self.scales is None:
            how: dict[str, Any] = {"size": [self.sizes[d] if d == dim else 2 for d in range(2, len(sizes))]}
        else:
            how = {"scale_factor": [self.scales[d - 2] if d == dim else 1.0 for d in range(2, len(sizes))]}
        out = self.func(images, **how, **self.options).movedim(dim, 1)
        return out.flatten(2)[..., 0]


class _Taps:
    """Weighted sums of a few elements each along one dim, sharded or not.

    Args:
        weights: which elements and how much of each, for every element of the result.
        layout, output: of the tensor and of the result.
        dim: which is resized.
        sizes: of that dim, before and after.
    """

    def __init__(
        self,
        weights: tuple[torch.Tensor, torch.Tensor],
        layout: Layout,
        output: Layout,
        dim: int,
        sizes: tuple[int, int],
    ) -> None:
        (index, share), self.dim = weights, dim
        result = fit_rank(output, layout.ndim)

        def made(coordinate: tuple[int, ...]) -> torch.Tensor:
            """What the rank there makes of the result."""
            return indices_of(dim_intervals(result, (1,) * dim + (sizes[1],), dim, coordinate))

        self.move = ExchangePlan.along(layout, sizes[0], dim, lambda coordinate: index[made(coordinate)].unique())
        mine = made(layout.info.my_coordinate())
        self.places, self.share = torch.searchsorted(index[mine].unique(), index[mine]), share[mine]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the result; low precision is widened."""
        x = self.move(x, self.dim)
        places = self.places.to(x.device)
        if places.shape[1] == 1:
            return x.index_select(self.dim, places[:, 0])
        x = wide(x)
        share = self.share.to(x.device, x.dtype)
        view = [-1 if d == self.dim else 1 for d in range(x.ndim)]
        terms = (x.index_select(self.dim, places[:, k]) * share[:, k].view(view) for k in range(places.shape[1]))
        return sum(terms, start=x.new_zeros(()))
