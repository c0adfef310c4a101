"""The precision in which terms of low-precision tensors are added up: rounding, or overflow, would else show."""

from __future__ import annotations

import torch

__all__ = ["LOW", "wide", "wide_dtype"]

LOW = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in LOW else dtype


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in :func:`wide_dtype`; itself where that is its own."""
    return x.to(wide_dtype(x.dtype))
