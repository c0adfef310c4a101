"""Variance and standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout
from hyper_parallel.rules import Call, OpSummary, OverAxes, Reduction, Signature, wide

_WITH_FLAG = Signature("input, dim, unbiased, keepdim")


class Moments(Reduction):
    """``var``, ``std``, ``var_mean``, ``std_mean``.

    Over a sharded dim: two small all-reduces, the sum and then the sum of squared distances from the mean; one
    backward.

    Args:
        root: whether the root is taken (``std``).
        mean: whether the mean is returned too.
    """

    summary = OpSummary(
        "every dim",
        communicates="sharded folded dim: 2 all-reduces | 1",
    )

    signature = "input, dim=None, *, unbiased=True, correction=1, keepdim=False"

    def __init__(self, op_name: str, *, root: bool = False, mean: bool = False) -> None:
        super().__init__(op_name)
        self.root, self.mean = root, mean
        self.arguments = _Overloads(self.signature)

    def num_outputs(self, call: Call) -> int:
        return 2 if self.mean else 1

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        over = self.over(call, targets)
        if not over:
            return None
        dims, keep, count = self.folded(call), self.keepdim(call), self.count(call)
        root, both, bind = self.root, self.mean, self.arguments.bind

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            spread, mean = variance(x, over, dims, count, _correction(bind((x, *args), kwargs)), keep)
            found = _root(spread) if root else spread
            found = found.to(x.dtype.to_real())
            return (found, mean.to(x.dtype)) if both else found

        return local


class _Overloads(Signature):
    """``var(x, unbiased)`` and ``var(x, dim, unbiased, keepdim)`` beside the documented form."""

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) == 2 and isinstance(args[1], bool):
            return super().bind(args[:1], {"unbiased": args[1], **kwargs})
        if len(args) > 2:
            return _WITH_FLAG.bind(args, kwargs)
        return super().bind(args, kwargs)


def _correction(given: dict[str, Any]) -> float:
    if given.get("unbiased") is not None:
        return int(given["unbiased"])
    found = given.get("correction")
    return 1 if found is None else found


def _root(x: torch.Tensor) -> torch.Tensor:
    """The square root, with gradient 0 at 0 as PyTorch's ``std`` has it."""
    zero = x == 0
    return torch.where(zero, 0, torch.where(zero, 1, x).sqrt())


def variance(
    x: torch.Tensor, over: OverAxes, dims: tuple[int, ...], count: int, correction: float, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean over ``dims``, of which ``over`` shards some; ``count`` is the global number of elements."""
    x = wide(x)
    mean = over.sum(x.sum(dims, keepdim=True), varying=True) / count
    away = x - mean
    squares = (away * away.conj()).real.sum(dims, keepdim=keepdim)
    # Fewer elements than the correction: inf or nan, as PyTorch gives.
    spread = over.sum(squares) / max(count - correction, 0)
    shown = mean if keepdim else mean.squeeze(dims)
    return spread, over.settle(shown)
