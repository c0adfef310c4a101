"""The dtypes of sums: in which terms of low precision are added up, as rounding or overflow would else show, and which
casts a sum may go through term by term."""

from __future__ import annotations

import torch

__all__ = ["LOW", "casts_by_term", "wide", "wide_dtype"]

LOW = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in LOW else dtype


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in :func:`wide_dtype`; itself where that is its own."""
    return x.to(wide_dtype(x.dtype))


def casts_by_term(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether the terms of a sum may be cast instead of the sum; rounding to whole numbers is not linear."""
    if old is new:
        return True
    if new is torch.bool or old is torch.bool:
        return False
    whole = not (new.is_floating_point or new.is_complex)
    return not whole or not (old.is_floating_point or old.is_complex)
