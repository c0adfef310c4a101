"""The ``apply`` of another library's ``autograd.Function`` as an operator.

``SomeFunction.apply`` never reaches ``__torch_function__``: DTensors would arrive inside of its ``forward``, and there
in a kernel that knows nothing of them. Where a rule names it (``acme.kernels.SomeFunction.apply``), ``apply`` of that
class is replaced by one that gives calls with DTensors to the dispatcher; all others go the old way. The rule sees the
arguments under the names of ``forward``'s parameters, which change less from version to version than their order. On
the local tensors the function records its own backward.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from hyper_parallel import _wiring
from hyper_parallel.utils.function_names import SERVED_NAME, name_of_served
from hyper_parallel.utils.import_hooks import when_imported

__all__ = ["serve_apply"]

_CLASSES: dict[str, set[str]] = {}  # by module


def serve_apply(name: str) -> None:
    """Let the dispatcher see calls of ``module.Class.apply`` with DTensors, as soon as the module is imported."""
    module, _, class_name = name.removesuffix(".apply").rpartition(".")
    _CLASSES.setdefault(module, set()).add(class_name)
    when_imported(module, _serve_classes)


def _serve_classes(module: types.ModuleType) -> None:
    for class_name in _CLASSES.get(module.__name__, ()):
        _serve(module, class_name)


def _serve(module: types.ModuleType, class_name: str) -> None:
    import torch  # not before there is a function: the registry is read without torch too

    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, torch.autograd.Function):
        return
    function: Any = found
    if name_of_served(getattr(function.__dict__.get("apply"), "__func__", None)) is not None:
        return  # a parent's does not count
    before: Any = function.apply
    plain: Any = inspect.getattr_static(function, "apply")
    signature = _signature_of_call(function)
    by_name = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values())

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from hyper_parallel.utils.structures import tensors_of  # it imports torch

        if cls is not function:
            return plain.__get__(None, cls)(*args, **kwargs)
        if kwargs:  # so come those of the dispatcher; the function before may take none
            args = _by_position(signature, args, kwargs)
        if not any(isinstance(t, _wiring.dtensor_type()) for t in tensors_of(args)):
            return before(*args)
        if by_name:
            return _wiring.dispatch(served, (), signature.bind(*args).arguments)
        return _wiring.dispatch(served, args, {})

    apply.__name__ = f"{class_name}.apply"
    apply.__qualname__, apply.__module__ = f"{function.__qualname__}.apply", function.__module__
    setattr(apply, SERVED_NAME, f"{module.__name__}.{class_name}.apply")
    function.apply = classmethod(apply)
    served = function.apply
    for alias, value in vars(module).items():
        if isinstance(value, types.MethodType) and value == before:  # norm = FusedNorm.apply
            setattr(module, alias, served)


def _by_position(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    bound = signature.bind(*args, **kwargs)
    if len(bound.args) < len(bound.arguments):  # one before the last has its default
        bound.apply_defaults()
    return bound.args


def _signature_of_call(function: Any) -> inspect.Signature:
    """The parameters of ``apply``: those of ``forward`` without its context, which only one of its two forms has."""
    import torch

    signature = inspect.signature(function.forward)
    parameters = list(signature.parameters.values())
    has_context = function.setup_context is torch.autograd.Function.setup_context
    return signature.replace(parameters=parameters[1:] if has_context else parameters)
