"""In-place forms by functions that are not."""

from __future__ import annotations

from collections.abc import Callable

import torch


def overwrite(x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``x.copy_(compute(x))``, right where the backward of ``compute`` reads the value that is overwritten."""
    needs_old = x.requires_grad and torch.is_grad_enabled()
    return x.copy_(compute(x.clone() if needs_old else x))
