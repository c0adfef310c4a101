"""Make ``torch.utils.swap_tensors`` swap DTensors, as modules do with their parameters inside of ``.to(dtype)`` and
``load_state_dict`` after ``torch.__future__.set_swap_module_params_on_conversion(True)``.

PyTorch swaps attributes and refuses tensors with weak references. Here a parameter's attributes say what it is in its
module, and weak references which parameter took the place of which: both stay with the object, and what is swapped is
what the tensors hold. (Read in PyTorch 2.13.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hyper_parallel.tensor import autograd_bridge


def install(tensor_class: type) -> None:
    """For two tensors of this class."""
    swap: Callable[..., None] = torch.utils.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(t1: Any, t2: Any) -> None:
        if isinstance(t1, tensor_class) and isinstance(t2, tensor_class):
            _swap(t1, t2)
        else:
            swap(t1, t2)

    torch.utils.swap_tensors = swap_tensors


def _swap(t1: Any, t2: Any) -> None:
    held = [(tensor._resolve(), tensor._spec) for tensor in (t1, t2)]
    for tensor, (local, spec) in zip((t2, t1), held, strict=True):
        _refuse_gradients_of_before(local)
        tensor.forget_forms()
        autograd_bridge.renew_wrapper(tensor, spec, local.device, local.requires_grad)
        tensor._local, tensor._spec, tensor._pending, tensor._grad_wrapper = local, spec, None, None


def _refuse_gradients_of_before(local: torch.Tensor) -> None:
    """Let a graph that is still alive refuse to accumulate into a tensor that went elsewhere; as PyTorch does."""
    if local.is_leaf and local.requires_grad:
        get_gradient_edge(local).node.register_prehook(_refuse)


def _refuse(gradients: Any) -> None:
    raise RuntimeError(
        "backward reached a tensor that torch.utils.swap_tensors swapped after the forward: change dtype or device of "
        "a module, or load its state dict, before the forward or after the backward"
    )
