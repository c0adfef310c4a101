"""The ``apply`` of another library's ``autograd.Function`` as an operator.

``SomeFunction.apply`` never reaches ``__torch_function__``: DTensors would arrive inside of its ``forward``, and there
in a kernel that knows nothing of them. Where a rule names it (``acme.kernels.SomeFunction.apply``), ``apply`` of that
class is replaced by one that gives calls with DTensors to the dispatcher; all others go the old way. The rule sees the
arguments under the names of ``forward``'s parameters, which change less from version to version than their order. On
the local tensors the function records its own backward.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from hyper_parallel.after_import import when_imported

__all__ = ["serve_apply"]

_MARK = "_serves_dtensors"


def serve_apply(name: str) -> None:
    """Let the dispatcher see calls of ``module.Class.apply`` with DTensors, as soon as the module is imported."""
    module, _, class_name = name.removesuffix(".apply").rpartition(".")
    when_imported(module, functools.partial(_serve, class_name))


def _serve(class_name: str, module: types.ModuleType) -> None:
    import torch  # not before there is a function: the registry is read without torch too

    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, torch.autograd.Function):
        return
    function: Any = found
    if hasattr(getattr(function.__dict__.get("apply"), "__func__", None), _MARK):
        return  # a parent's mark does not count
    plain = function.apply.__func__
    signature = _signature_of_call(function)
    by_name = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values())

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from hyper_parallel.dispatcher import dispatch
        from hyper_parallel.dtensor import DTensor
        from hyper_parallel.structures import tensors_of

        if cls is not function or not any(isinstance(t, DTensor) for t in tensors_of((args, kwargs))):
            return plain(cls, *args, **kwargs)
        if by_name:
            return dispatch(served, (), signature.bind(*args, **kwargs).arguments)
        return dispatch(served, args, kwargs)

    apply.__name__ = f"{function.__name__}.apply"
    apply.__qualname__, apply.__module__ = f"{function.__qualname__}.apply", function.__module__
    setattr(apply, _MARK, True)
    function.apply = classmethod(apply)
    served = function.apply


def _signature_of_call(function: Any) -> inspect.Signature:
    """The parameters of ``apply``: those of ``forward`` without its context, which only one of its two forms has."""
    import torch

    signature = inspect.signature(function.forward)
    parameters = list(signature.parameters.values())
    has_context = function.setup_context is torch.autograd.Function.setup_context
    return signature.replace(parameters=parameters[1:] if has_context else parameters)
