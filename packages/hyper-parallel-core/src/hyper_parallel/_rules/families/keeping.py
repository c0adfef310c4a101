"""What a Function keeps for its backward, where the program may write to the same tensor meanwhile."""

from __future__ import annotations

import torch

from hyper_parallel import torch_compat


def kept(x: torch.Tensor) -> torch.Tensor:
    """The tensor as it is now, to be saved by a Function whose counterpart on one device saves something else.

    It shares the memory of ``x`` until one of the two is written, and is copied only then. Saved itself, the backward
    would refuse a write to ``x`` that it allows on one device, and only on the ranks that hold what is written. On
    devices where memory cannot be shared so, this is ``x``, and the write is refused.
    """
    shares = type(x) is torch.Tensor and x.device.type in ("cpu", "cuda")
    return torch_compat.lazy_clone(x) if shares else x
