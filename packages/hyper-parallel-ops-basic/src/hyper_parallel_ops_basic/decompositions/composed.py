"""Functions that are others in sequence: their layouts, gradients and communication are those of the parts."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from hyper_parallel import DTensor
from hyper_parallel.rules import FunctionOp, OpSummary, Signature, overwrite, replica_spec, wrap

_CHECKS = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)


class Composed(FunctionOp):
    """A function written in Python with torch functions that have rules.

    The in-place form copies the result into its target.

    Args:
        module: where the function is found.
        function: its name; by default the op's (last) name.
        says: what the table of operators says, where that is more than "as its parts".
    """

    summary = OpSummary(
        "as its parts (the functions that its composition calls)",
        pending="as its parts",
        communicates="that of its parts",
    )

    def __init__(self, op_name: str, *, module: str, function: str = "", **says: str) -> None:
        super().__init__(op_name)
        self.module, self.function = module, function or op_name.rpartition(".")[2]
        if says:
            self.summary = OpSummary(**says)

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        composition = getattr(importlib.import_module(self.module), self.function)
        kwargs = _signature(composition).with_own_names(func, kwargs)
        if func.__name__.endswith("_") and not func.__name__.startswith("__"):
            return overwrite(args[0], lambda old: composition(old, *args[1:], **kwargs))
        return composition(*args, **kwargs)


@cache
def _signature(composition: Callable[..., Any]) -> Signature:
    return Signature(", ".join(inspect.signature(composition).parameters))


class TorchBody(FunctionOp):
    """A function that PyTorch itself writes in Python, with torch functions that have rules: its own body runs."""

    summary = OpSummary(
        "as the functions in its Python body",
        pending="as its parts",
        communicates="that of its parts",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return body_of(func)(*args, **kwargs)


@cache
def body_of(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its question whether an argument overrides it."""
    assert isinstance(func, types.FunctionType), f"{func} is not written in Python"
    scope = {**func.__globals__, **dict.fromkeys(_CHECKS, _no)}
    body = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _no(*args: Any) -> bool:
    return False


def plain_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value that every rank has, next to ``tensor`` on its mesh."""
    return wrap(value, replica_spec(value, tensor.layout)) if isinstance(tensor, DTensor) else value


def lying_like(input: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out``, images as ``input``, with channels innermost in memory where those of ``input`` are: kernels for CPUs do
    so, those for other devices give contiguous results."""
    if input.ndim != 4 or input.device.type != "cpu":
        return out
    _, channels, height, width = input.shape
    channels_last = (height * width * channels, 1, width * channels, channels)
    return out.contiguous(memory_format=torch.channels_last) if input.stride() == channels_last else out
