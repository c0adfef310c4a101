"""What travels when a pending reduction is carried out: the reduce op of the collective, and the form of the values.

Sums and products travel as they are, those of int16 as int32, as not every backend knows it. Two reductions do not:

- ``max`` and ``min`` of floats travel as integers of the same order, so that a NaN on one rank reaches all of them, as
  in PyTorch's ``max``. Collective libraries compare floats, and drop or keep a NaN depending on the order of the ranks.
- A p-norm (``Partial("norm2.0")``: the root of the sum of p-th powers over the ranks) travels as powers and is a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

__all__ = ["Wire", "norm_op", "norm_order", "wire"]

_NORM = "norm"


class Wire(NamedTuple):
    """How one reduction travels.

    Attributes:
        op: reduce op of the collective.
        encode: values to what is sent; None when they travel as they are.
        decode: what arrived, back to values.
    """

    op: str
    encode: Callable[[torch.Tensor], torch.Tensor] | None = None
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None


def norm_op(p: float) -> str:
    """Reduce op of a pending p-norm, ``0 < p < inf``."""
    return f"{_NORM}{float(p)}"


def norm_order(op: str) -> float | None:
    """The p of a pending p-norm; None for other reduce ops."""
    return float(op[len(_NORM) :]) if op.startswith(_NORM) else None


@cache
def wire(op: str, dtype: torch.dtype) -> Wire:
    """How a pending ``op`` on tensors of ``dtype`` travels."""
    if op in ("max", "min") and dtype.is_floating_point:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        bits = torch.int64 if dtype is torch.float64 else torch.int32
        limits = torch.iinfo(bits)
        nan = limits.max if op == "max" else limits.min
        return Wire(op, lambda x: _ordered(x.to(wide), bits, nan), lambda x: _from_ordered(x, wide, nan).to(dtype))
    p = norm_order(op)
    if p is not None:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        return Wire("sum", lambda x: x.to(wide).pow(p), lambda x: x.pow(1 / p).to(dtype))
    if dtype is torch.int16:
        return Wire(op, lambda x: x.to(torch.int32), lambda x: x.to(torch.int16))
    return Wire(op)


def _ordered(x: torch.Tensor, bits: torch.dtype, nan: int) -> torch.Tensor:
    """Integers in the order of the floats: the bits of a negative float count backwards."""
    raw = x.contiguous().view(bits)
    return torch.where(x.isnan(), nan, torch.where(raw < 0, raw ^ torch.iinfo(bits).max, raw))


def _from_ordered(key: torch.Tensor, wide: torch.dtype, nan: int) -> torch.Tensor:
    value = torch.where(key < 0, key ^ torch.iinfo(key.dtype).max, key).view(wide)
    return torch.where(key == nan, torch.nan, value)
