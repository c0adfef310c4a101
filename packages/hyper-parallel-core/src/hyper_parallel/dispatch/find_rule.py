"""What serves a torch function: a rule with its plans, or a handler that needs none.

Handlers call other functions by ``DTensor.__torch_function__``, which is the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.op import DistributedOp, FunctionOp
from hyper_parallel._rules.strategy import LayoutOp
from hyper_parallel.context import state
from hyper_parallel.dispatch.arguments import on_locals
from hyper_parallel.dispatch.entry import DispatchEntry
from hyper_parallel.dispatch.ops_without_rule import handler_of
from hyper_parallel.dispatch.out_argument import into_out
from hyper_parallel.dispatch.three_phase_rules import ThreePhaseEntry
from hyper_parallel.errors import MissingOpError
from hyper_parallel.registry.registry import default_registry, get_distributed_op
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import become_view
from hyper_parallel.utils.function_names import aten_binding

__all__ = ["register_function", "rule_of"]

Handler = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]

_named: dict[Any, tuple[str, Any]] = {}


def register_function(func: Callable[..., Any], op_name: str, grad_placements: Any = None) -> Callable[..., Any]:
    """Serve a function of local tensors by the op registered under a name; returns the key for the dispatcher."""
    _named[func] = (op_name, grad_placements)
    return func


def rule_of(func: Callable[..., Any]) -> DispatchEntry | Handler:
    """The rule or special handler of a function.

    Raises:
        MissingOpError: there is none.
    """
    registry = default_registry()
    handler = handler_of(func)
    if handler is not None:
        return handler
    if func in _named:
        op_name, gradients = _named[func]
        rule = _entry(func, get_distributed_op(op_name), op_name)
        rule.grad_placements = gradients
        return rule
    op, binding = registry.find(func), aten_binding(func)
    if binding is not None and op is registry.find(binding) and (op is not None or handler_of(binding) is not None):
        return _of_binding(func, binding)
    if op is None:
        raise MissingOpError(registry.missing_message(func), func=func)
    return _of_function(op) if isinstance(op, FunctionOp) else _of_op(func, op)


def _of_op(func: Callable[..., Any], op: DistributedOp) -> DispatchEntry | Handler:
    rule = _entry(func, op, getattr(func, "__name__", None) or str(func))
    if rule.inplace and getattr(op, "makes_views", False) and not rule.name.startswith("__"):
        return _of_view(rule.name.removesuffix("_"))
    return rule


def _entry(func: Callable[..., Any], op: DistributedOp, name: str) -> DispatchEntry:
    return (DispatchEntry if isinstance(op, LayoutOp) else ThreePhaseEntry)(func, op, name)


def _of_binding(func: Any, binding: Callable[..., Any]) -> Handler:
    """The handler of an operator of ``torch.ops.aten``: the function that it is in PyTorch's Python layer."""
    overload = func if hasattr(func, "_schema") else getattr(func, func.overloads()[0])
    # The one default in which they differ: there a loss that is not told how to reduce does not.
    arguments = overload._schema.arguments
    defaults = {a.name: (at, a.default_value) for at, a in enumerate(arguments) if a.name == "reduction"}

    def run(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        missing = {name: value for name, (at, value) in defaults.items() if len(args) <= at}
        return DTensor.__torch_function__(binding, (), args, missing | kwargs)

    return run


def _of_view(name: str) -> Handler:
    """The handler of ``unsqueeze_`` and its like: the tensor becomes its own view."""
    view_of = getattr(torch.Tensor, name)

    def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return become_view(args[0], DTensor.__torch_function__(view_of, (), args, kwargs), func.__name__)

    return run


def _of_function(op: FunctionOp) -> Handler:
    def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if state.mode.skip:
            return on_locals(func, args, kwargs)
        if "out" in kwargs and not op.writes_out:
            return into_out(func, args, kwargs)
        return op.run(func, args, kwargs)

    return run
