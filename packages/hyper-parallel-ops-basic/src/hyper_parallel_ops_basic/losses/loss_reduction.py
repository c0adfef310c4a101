"""The reduction of a loss, as its arguments say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.rules import torch_compat


def reduction_of(argument: Callable[[str, Any], Any]) -> str:
    """``"none"``, ``"mean"``, ``"sum"`` (or ``"batchmean"``), old arguments included.

    Args:
        argument: gives an argument by name, or the default passed second.
    """
    average, reduce = argument("size_average", None), argument("reduce", None)
    if average is not None or reduce is not None:
        return torch_compat.loss_reduction.legacy_get_string(average, reduce)
    return argument("reduction", "mean")
