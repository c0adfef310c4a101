"""Who asks a DTensor for its memory is refused: it has none, and code that computed on the piece of one rank as if it
were the whole would be wrong without a word.

The error names the ``autograd.Function`` that was running, as the kernels of other libraries are called by one, and
what gives it a rule. Nobody is let through by who he is: what PyTorch itself asks memory for is done where it asks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from hyper_parallel.errors import MissingOpError

__all__ = ["apply_name", "how_to_serve", "inside_of", "install", "refusal"]

# The frames in which PyTorch calls forward and backward, with the variable that tells whose.
_FORWARD: Any = torch.autograd.Function.apply
_BACKWARD: Any = (BackwardCFunction.apply, BackwardCFunction.apply_boxed)
_CALLERS = {_FORWARD.__func__.__code__: "cls", **{method.__code__: "self" for method in _BACKWARD}}

# What those ask who write a state dict to a file: safetensors, and save_pretrained of transformers.
_STORAGES = ("data_ptr()", "storage(...)", "untyped_storage(...)")
_SAVING = (
    "\n  to write a model that is spread: hyper_parallel.checkpoint.save_safetensors(model, folder) instead of "
    "model.save_pretrained(folder) and safetensors' save_file(); on all ranks"
)


def refusal(question: str) -> MissingOpError:
    """The error for a question about memory, such as ``untyped_storage``."""
    function = _running_function()
    return MissingOpError(
        f"{question}: a DTensor has no memory of its own, this rank's piece has: x.to_local().{question}"
        + (_SAVING if function is None and question in _STORAGES else "")
        + ("" if function is None else f"\n{how_to_serve(function)}"),
        func=None if function is None else function.apply,
        op_name=None if function is None else apply_name(function),
    )


def inside_of() -> str:
    """For an error: which ``autograd.Function`` is running, and how to give it a rule; empty when none is."""
    function = _running_function()
    return "" if function is None else f"\n{how_to_serve(function)}"


def apply_name(function: Any) -> str:
    """What a rule for an ``autograd.Function`` is called."""
    return f"{function.__module__}.{function.__qualname__}.apply"


def how_to_serve(function: Any) -> str:
    """What gives an ``autograd.Function`` a rule, in two lines with its own names."""
    name = apply_name(function)
    parameters = list(inspect.signature(function.forward).parameters.values())
    if function.setup_context is torch.autograd.Function.setup_context:
        parameters = parameters[1:]  # the context
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if "<locals>" in name or not parameters or any(p.kind in kinds for p in parameters):
        return f"  it was asked inside of {name}: call that on local tensors, by hyper_parallel.custom_shard"
    signature = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    row = f'{{"{parameters[0].name}": 0, "out": 0}}'
    return (
        f"  {name} has no distributed rule. Two lines add one; each row lists dims that may be sharded together:\n"
        "    from hyper_parallel.rules import Listed\n"
        f'    Listed("{name}", signature="{signature}", rows=[{row}])\n'
        '  (docs/write-an-op.md, "A kernel inside of somebody\'s autograd.Function"); or call it by custom_shard'
    )


def _running_function() -> Any:
    """The innermost ``autograd.Function`` whose forward or backward is running, if any."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        variable = _CALLERS.get(frame.f_code)
        if variable is not None:
            owner = frame.f_locals[variable]
            return getattr(owner, "_forward_cls", owner)
        frame = frame.f_back
    return None


# -- where PyTorch itself asks -----------------------------------------------------------------------------------------


def install(tensor_class: type) -> None:
    """Answer for tensors of this class what PyTorch's own code asks their memory for."""
    rnn: Any = torch.nn.RNNBase
    flatten = rnn.flatten_parameters

    def flatten_parameters(self: Any) -> None:
        """Sharded weights cannot lie in one chunk of memory."""
        if not any(isinstance(weight, tensor_class) for weight in self._flat_weights):
            flatten(self)

    rnn.flatten_parameters = _like(flatten, flatten_parameters)
    dlpack: Any = torch.utils.dlpack
    to_dlpack = dlpack.to_dlpack

    def refusing(tensor: Any) -> Any:
        if isinstance(tensor, tensor_class):
            raise refusal("__dlpack__()")
        return to_dlpack(tensor)

    dlpack.to_dlpack = torch.to_dlpack = _like(to_dlpack, refusing)  # type: ignore[attr-defined]


def _like(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    wrapper.__name__, wrapper.__doc__ = function.__name__, function.__doc__
    return wrapper
