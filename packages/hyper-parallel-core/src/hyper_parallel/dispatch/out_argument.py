"""The ``out=`` form of a function: a result is written into DTensors that are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.context import state
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import before_write
from hyper_parallel.utils.structures import tensors_of


def into_out(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The ``out=`` form: compute, then write into the given DTensors, whose layout stays."""
    out = kwargs["out"]
    given = {name: value for name, value in kwargs.items() if name != "out"}
    if out is None:
        return DTensor.__torch_function__(func, (), args, given)
    if not any(isinstance(t, DTensor) for t in tensors_of((list(args), given))):
        raise TypeError(
            f"{func.__name__}: out= is a DTensor and no input is one; make the inputs DTensors (distribute_tensor), or "
            "copy_() the result into it"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of((args, kwargs))):
        # As PyTorch says it.
        raise RuntimeError(
            "functions with out=... arguments don't support automatic differentiation, but one of the arguments "
            "requires grad."
        )
    result = DTensor.__torch_function__(func, (), args, given)
    many = isinstance(out, (tuple, list))
    for target, value in zip(out if many else (out,), result if many else (result,), strict=True):
        if not isinstance(target, DTensor):
            raise TypeError("out= must be a DTensor when an input is one")
        if target.shape != value.shape:
            raise ValueError(
                f"out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}; a DTensor is not resized"
            )
        if value.layout is not target.layout:
            if state.mode.policy != "auto" and not value.layout.is_partial():
                raise ValueError(
                    f"out= is laid out as {target.layout}, the result as {value.layout}; redistribute one of them, "
                    "or run inside `with hyper_parallel.redistribute_policy('auto'):` (torch.nn.utils' spectral_norm "
                    "wants that around the call that adds it, and around each forward)"
                )
            value = value.redistribute(target.layout)
        before_write(target)
        target._resolve().copy_(value._resolve())
    return out
