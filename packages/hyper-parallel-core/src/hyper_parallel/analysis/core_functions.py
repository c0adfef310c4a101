"""Torch functions that work on DTensors without a rule, because core answers them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.dispatch.ops_without_rule import handler_of
from hyper_parallel.tensor.dtensor import DTensor

__all__ = ["is_answered_by_core"]


# They take numbers, which they read out of a tensor as ``item`` does.
_TAKE_NUMBERS = (torch.arange, torch.tensor)


def is_answered_by_core(func: Callable[..., Any]) -> bool:
    """Whether DTensor has the method or property itself, or the dispatcher needs no rule for the function."""
    if func in _TAKE_NUMBERS or handler_of(func) is not None:
        return True
    owner = getattr(func, "__self__", None)
    if isinstance(func, types.MethodWrapperType) and isinstance(owner, (types.GetSetDescriptorType, property)):
        name = owner.fget.__name__ if isinstance(owner, property) and owner.fget else getattr(owner, "__name__", "")
        return _is_own(name)
    name = getattr(func, "__name__", "")
    return _is_own(name) and getattr(torch.Tensor, name, None) is func


def _is_own(name: str) -> bool:
    """Whether DTensor defines this attribute itself."""
    return getattr(DTensor, name, None) is not getattr(torch.Tensor, name, None)
