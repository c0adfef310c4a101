"""A function of someone's module, in plain Python, as an operator.

Calls of such a function never reach ``__torch_function__`` as one: DTensors would go through each line of it. Where a
rule names it (``package.module:function``), that global is replaced, as soon as the module is imported, by a function
that gives calls with DTensors to the dispatcher; all others go the old way, and so does the call on local tensors.
Modules that imported the function by name before keep the old one: a rule names the place where it is called.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from hyper_parallel import _wiring
from hyper_parallel.utils.function_names import SERVED_NAME, is_module_function, name_of_served
from hyper_parallel.utils.import_hooks import when_imported

__all__ = ["serve_module_function"]

_FUNCTIONS: dict[str, set[str]] = {}  # by module


def serve_module_function(name: str) -> None:
    """Let the dispatcher see calls of ``module:function`` with DTensors, as soon as the module is imported."""
    assert is_module_function(name)
    module, _, function = name.partition(":")
    _FUNCTIONS.setdefault(module, set()).add(function)
    when_imported(module, _serve_functions)


def _serve_functions(module: types.ModuleType) -> None:
    for name in _FUNCTIONS.get(module.__name__, ()):
        before = getattr(module, name, None)
        if callable(before) and not isinstance(before, type) and name_of_served(before) is None:
            setattr(module, name, _served(before, f"{module.__name__}:{name}"))


def _served(before: Any, name: str) -> Any:
    from hyper_parallel.utils.structures import tensors_of  # it imports torch

    @functools.wraps(before)
    def function(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(t, _wiring.dtensor_type()) for t in tensors_of((args, kwargs))):
            return _wiring.dispatch(function, args, kwargs)
        return before(*args, **kwargs)

    setattr(function, SERVED_NAME, name)
    return function
