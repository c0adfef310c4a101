"""Put another forward in the place of a module's, so that copies of the module and users' hooks keep working."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from hyper_parallel.context import implicit_replication, module_call, state
from hyper_parallel.tensor.untraced import untraced

NOT_COMPILED = (
    "torch.compile cannot trace DTensors of hyper_parallel: a module whose parameters are spread runs as it is. "
    "Compile the functions of plain tensors inside it, or leave out fullgraph=True"
)


def replicate_plain_inside(module: nn.Module) -> None:
    """Make plain tensors that meet DTensors inside the module's forward (buffers, masks, position ids) count as
    Replicate; and what is computed of parameters for one forward of the outermost such module serve that one only."""
    if getattr(module.forward, "_replicates_plain", False):
        return
    function = forward_function(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if state.mode.replicate_plain and state.call is not None:
            return function(self, *args, **kwargs)
        # What a module without children takes others may take too, outside of its call.
        with implicit_replication(), module_call() if next(self.children(), None) is not None else nullcontext():
            return function(self, *args, **kwargs)

    untraced(functools.update_wrapper(forward, function), NOT_COMPILED)
    forward._replicates_plain = True  # type: ignore[attr-defined]
    set_forward(module, forward)


def forward_function(module: nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of the module and its inputs."""
    inner = module.forward
    if isinstance(inner, types.MethodType) and inner.__self__ is module:
        return inner.__func__

    @functools.wraps(inner)
    def function(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    signature, module_first = inspect.signature(inner), inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    changed = signature.replace(parameters=[module_first, *signature.parameters.values()])
    function.__signature__ = changed  # type: ignore[attr-defined]
    return function


def set_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let ``function(module, *inputs)`` be the module's forward: as a bound method and not as a closure over the
    module, so that ``copy.deepcopy`` binds it to the copy."""
    module.forward = types.MethodType(function, module)
    module.__dict__["_not_pickled"] = _NOT_PICKLED


class _NotPickled:
    """Refuses to be pickled, for the module that has it: a method is pickled by name, so the module would come back
    with the forward of its class and without what took its place. (Copies are no pickles.)"""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a module whose forward was replaced (by parallelize_module or shard_module) cannot be pickled: save its "
            "parameters, model.state_dict(), and parallelise a new model before loading them"
        )

    def __copy__(self) -> _NotPickled:
        return self

    def __deepcopy__(self, memo: Any) -> _NotPickled:
        return self


_NOT_PICKLED = _NotPickled()
