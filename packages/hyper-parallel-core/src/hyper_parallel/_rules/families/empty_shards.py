"""Results of ranks that hold nothing to compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["zeros_from"]


def zeros_from(shape: Sequence[int], *inputs: torch.Tensor | None) -> torch.Tensor:
    """Zeros of this shape, with dtype and device of the first input, that depend on all inputs with gradient zero.

    Kernels refuse empty tensors, but a rank that leaves the graph would not take part in the backward's collectives.
    """
    return _ZerosFrom.apply(tuple(shape), *(x for x in inputs if x is not None))


class _ZerosFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        # Zeros that depend on everything again, for second derivatives.
        inputs = ctx.saved_tensors
        found = [x.is_floating_point() or x.is_complex() for x in inputs]
        return None, *(zeros_from(x.shape, x, grad) if f else None for x, f in zip(inputs, found, strict=True))
