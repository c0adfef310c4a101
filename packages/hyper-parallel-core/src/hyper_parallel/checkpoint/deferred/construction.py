"""Build a module without its memory, as it would be built on one device.

Its constructor runs, but large tensors are deferred: what it does to them is recorded, with the state of the generator
where it draws. So each parameter can be made later by itself, or a block of it, with the numbers that one device gets.
Small tensors are made at once, for code that looks at them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from hyper_parallel import torch_compat
from hyper_parallel.checkpoint.deferred.tensor import DeferredTensor, Scratch, draw_into, run_deferred, value_of
from hyper_parallel.checkpoint.model_state import canonical
from hyper_parallel.torch_compat import TorchDispatchMode, pytree

__all__ = ["build_on_meta"]

SMALL = 4096
"""Tensors of fewer elements are made at once."""

Module = TypeVar("Module", bound=nn.Module)


def build_on_meta(make: Callable[[], Module], *, draw: bool = True) -> tuple[Module, dict[str, torch.Tensor]]:
    """Call a function that builds a module, and take the memory out of it.

    ::

        model, values = build_on_meta(lambda: AutoModelForCausalLM.from_config(config))
        parallelize(model, dims)
        give_values(model, values, device="cpu")

    No more than one large tensor is in memory at a time. The numbers are those that ``make`` draws on one device from
    the same seed; afterwards the generator is in the state in which ``make`` leaves it.

    Args:
        make: builds it on the CPU.
        draw: whether random numbers matter. If not, the generator stays as it is, which takes less time.

    Returns:
        The module, its parameters and buffers on the meta device; and by name the values that they have: for
        :func:`give_values`.
    """
    scratch = Scratch() if draw else None
    truncated = torch_compat.truncated_normal_by(functools.partial(_truncated_normal, scratch))
    with torch.device("cpu"), _DeferLarge(scratch), truncated, torch.random.fork_rng(devices=[], enabled=not draw):
        if not draw:
            torch.default_generator.manual_seed(0)  # what is drawn all the same is equal on all ranks
        module = make()
    values: dict[str, torch.Tensor] = {}
    emptied: dict[torch.Tensor, torch.Tensor] = {}  # hashed by identity
    for prefix, owner in module.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    values[canonical(f"{prefix}.{name}".lstrip("."))] = tensor.detach()
                    emptied.setdefault(tensor, _emptied(tensor))
                    tensors[name] = emptied[tensor]
        for name, tensor in vars(owner).items():
            if isinstance(tensor, DeferredTensor):
                setattr(owner, name, value_of(tensor).whole().clone())
    return module, values


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the meta device, a parameter as it was one, with the attributes that it was given."""
    empty = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        if name not in ("cell", "steps", "_is_param"):
            setattr(empty, name, value)
    return empty


def _truncated_normal(scratch: Scratch | None, draw: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """As one draw: it goes on until all numbers fit, looking at them, and would be recorded step by step."""
    if isinstance(tensor, DeferredTensor):
        return draw_into(draw, tensor, args, kwargs, scratch)
    return draw(tensor, *args, **kwargs)


class _DeferLarge(TorchDispatchMode):
    """Records what makes large tensors, and what is done to them."""

    def __init__(self, scratch: Scratch | None) -> None:
        super().__init__()
        self._scratch = scratch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_deferred = any(isinstance(tensor, DeferredTensor) for tensor in tensors)
        if is_deferred or (not tensors and self._is_large(func, args, kwargs)):
            return run_deferred(func, args, kwargs, scratch=self._scratch)
        return func(*args, **kwargs)

    def _is_large(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether what a function makes out of no tensor is one with many elements."""
        if "device" not in {argument.name for argument in func._schema.arguments}:
            return False
        made: Any = func(*args, **{**kwargs, "device": torch.device("meta")})
        return isinstance(made, torch.Tensor) and made.numel() >= SMALL
