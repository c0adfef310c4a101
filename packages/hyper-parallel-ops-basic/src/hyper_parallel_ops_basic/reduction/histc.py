"""Counting values: ``histc`` and ``bincount``. Each rank counts what it holds, which leaves a pending sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import DTensor, Layout, Strategy, StrategyOp
from hyper_parallel.rules import Call, FunctionOp, OpSummary, OverAxes, P, R, S, dispatch
from hyper_parallel_ops_basic.indexing.one_hot import number_of_classes
from hyper_parallel_ops_basic.reduction.min_max import local_extreme


class Histogram(StrategyOp):
    """``histc(input, bins, min, max)``.

    Without a range (``min == max``) it is that of the whole tensor, which costs two all-reduces of one number.
    """

    summary = OpSummary(
        "every dim; leaves a pending sum",
        communicates="none; without a range 2 all-reduces of one number",
    )

    signature = "input, bins=100, min=0, max=0"
    floats_matter = True

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        return [(int(call.arg("bins", 100)),)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.inputs[0].shape)):
            yield Strategy([S(d)], P)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        over = OverAxes(targets[0], range(targets[0].ndim))
        if not over or call.arg("min", 0) != call.arg("max", 0) or not call.inputs[0].shape.numel():
            return None
        bins = call.arg("bins", 100)
        dims = tuple(range(targets[0].ndim))

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            low, high = (float(over.extreme(local_extreme(x, dims, False, op), op)) for op in ("min", "max"))
            if low == high:  # PyTorch widens an empty range; given as such it would look for one in this rank's piece
                low, high = low - 1, high + 1
            return torch.histc(x, bins, low, high)

        return local


def histogram_of(input: torch.Tensor, bins: Any, range: tuple[float, float] | None, weight: torch.Tensor | None) -> Any:
    """``torch.histogram`` whose range, or edges, are given."""
    options: dict[str, Any] = {} if range is None else {"range": range}
    return torch.histogram(input, bins, weight=weight, **options)


class HistogramWithEdges(FunctionOp):
    """``histogram(input, bins, range=..., weight=..., density=False)``: counts and the edges of the bins.

    Without a range it is that of the whole tensor, which all ranks read.
    """

    summary = OpSummary(
        "every dim, weights alike; leaves a pending sum, and whole edges",
        communicates="none; without a range 2 all-reduces of one number; with density 1 of the counts",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        input, bins, given, weight, density = _histogram_arguments(*args, **kwargs)
        if isinstance(bins, int) and given is None and input.numel():
            lowest, highest = input.aminmax()
            given = (float(lowest), float(highest))
        counts, edges = dispatch(histogram_of, (input, bins, given, weight), {})
        if density:
            counts = counts / (counts.sum() * edges.diff())
        return torch.return_types.histogram((counts, edges))


def _histogram_arguments(
    input: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> tuple[Any, ...]:
    return input, bins, None if range is None else tuple(range), weight, density


class HistogramOf(StrategyOp):
    """:func:`histogram_of`."""

    summary = OpSummary(
        "every dim, weights alike; leaves a pending sum, and whole edges", pending="passes through the weights"
    )

    signature = "input, bins, range, weight"
    floats_matter = True

    def num_outputs(self, call: Call) -> int:
        return 2

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        bins = call.arg("bins")
        edges = bins + 1 if isinstance(bins, int) else call.spec("bins").shape[0]
        return [(edges - 1,), (edges,)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.spec("input").shape)):
            yield Strategy({"input": S(d), "weight": S(d)}, [P, R])
        if call.index("weight") is not None:
            yield Strategy({"weight": P}, [P, R])


def bincount_of(ids: torch.Tensor, weights: torch.Tensor | None, bins: int) -> torch.Tensor:
    """``torch.bincount`` of ids that are all below ``bins``."""
    return torch.bincount(ids, weights, bins)


class BinCount(FunctionOp):
    """``bincount(input, weights, minlength)``; how many bins there are is all-reduced first (one number)."""

    summary = OpSummary(
        "every dim, weights alike; leaves a pending sum",
        pending="passes through the weights",
        communicates="sharded ids: 1 all-reduce of the number of bins",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        ids, weights, least = _bound(*args, **kwargs)
        if isinstance(ids, DTensor):
            if ids.layout.is_partial():
                ids = ids.reduce_partial()
            bins = number_of_classes(ids) if ids.numel() else 0
        else:
            bins = int(ids.max()) + 1 if ids.numel() else 0
        return dispatch(bincount_of, (ids, weights, max(bins, least)), {})


def _bound(input: Any, weights: Any = None, minlength: int = 0) -> tuple[Any, Any, int]:
    return input, weights, minlength


class BinCountOf(StrategyOp):
    """:func:`bincount_of`."""

    summary = OpSummary("every dim, weights alike; leaves a pending sum", pending="passes through the weights")

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        return [(int(call.args[2]),)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield Strategy([S(0)] * len(call.inputs), P)
        if len(call.inputs) == 2:
            yield Strategy([R, P], P)  # linear in the weights

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if len(call.inputs) < 2 or not targets[0].shard_order[0] or not call.inputs[0].shape[0]:
            return None

        def local(ids: torch.Tensor, weights: torch.Tensor, bins: int) -> torch.Tensor:
            # Of nothing PyTorch gives whole numbers, with weights too.
            wide = torch.float32 if weights.dtype is torch.float32 else torch.float64
            return bincount_of(ids, weights, bins).to(wide)

        return local
