"""The dtypes that autocast gives to functions which it runs in float32, for those that run a form of their own here."""

from __future__ import annotations

import torch

from hyper_parallel.rules import LOW


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` as CUDA's autocast hands it to softmax, norms, sums and layer norms; on CPU they keep their dtype."""
    on = x.device.type == "cuda" and x.dtype in LOW and torch.is_autocast_enabled("cuda")
    return x.float() if on else x


def loss_dtype(x: torch.Tensor) -> torch.dtype:
    """Dtype of a loss of ``x``: float32 under any autocast."""
    return torch.float32 if x.dtype in LOW and torch.is_autocast_enabled(x.device.type) else x.dtype
