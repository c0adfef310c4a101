"""Makes up small calls of a function that somebody has a rule for, from its signature and its parameters' names.

A guess is kept only when the function accepts it on meta tensors, so a wrong one costs nothing.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import get_testing_overrides

from hyper_parallel.utils import function_names

__all__ = ["SampleCall", "functions_of", "sample_calls", "short_name"]

SIZE = 4
"""Length of every dimension of a sample: equal, so that most functions accept any combination."""

# What a parameter of this name usually is, where it is no tensor of floats.
_VALUES: dict[str, Any] = {
    "axis0": 0, "axis1": -1, "chunks": 2, "destination": -1, "diagonal": 0, "dim": -1, "dim0": 0, "dim1": -1,
    "dimension": -1, "dims": (0,), "dtype": torch.float64, "indices_or_sections": 2, "k": 2, "length": 2,
    "max": 1.0, "maxnorm": 1.0, "min": 0.0, "normalized_shape": (SIZE,), "num_groups": 2, "p": 2.0, "repeats": 2,
    "sections": 2, "shape": (-1,), "shifts": 1, "size": (-1,), "sizes": (2, 2), "source": 0, "split_size": 2,
    "split_size_or_sections": 2, "start": 0, "tensor_indices_or_sections": 2, "tensor_split_sections": 2,
    "threshold": 0.5, "value": 1.0,
}  # fmt: skip
# Functions whose useful parameters are optional, or are not told apart by their names.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "clamp": ("input", "min"),
    "clip": ("input", "min"),
    "where": ("condition", "input", "other"),
}
_INTEGER_TENSORS = frozenset({"index", "indices", "target"})
_BOOLEAN_TENSORS = frozenset({"mask", "condition"})
_LISTS_OF_TENSORS = frozenset({"tensors", "arrays"})


@dataclass(frozen=True)
class SampleCall:
    """A call that a function accepts.

    Attributes:
        func: the function.
        arguments: by name, meta tensors in the place of tensors.
        ndim: rank of the first tensor.
    """

    func: Callable[..., Any]
    arguments: dict[str, Any]
    ndim: int

    def __str__(self) -> str:
        name = short_name(self.func)
        return f"{name}({', '.join(_shown(n, v) for n, v in self.arguments.items())})"

    @property
    def tensor_names(self) -> list[str]:
        """A name for every tensor, in order; those of a list are numbered."""
        names = []
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                names.append(name)
            elif isinstance(value, list):
                names += [f"{name}[{i}]" for i in range(len(value))]
        return names


def short_name(func: Callable[..., Any]) -> str:
    """A function's readable name without its home, where that is torch's own."""
    name = function_names.display_name(func).removesuffix(".__get__")
    return name if name.startswith("torch.ops.") else name.removeprefix("torch.nn.functional.").removeprefix("torch.")


def functions_of(op_name: str) -> list[Callable[..., Any]]:
    """The functions that an op's name means."""
    if not function_names.is_dotted(op_name):
        return function_names.bare_functions(op_name)
    found = function_names.dotted_function(op_name)
    return [] if found is None else [found]


def sample_calls(op_name: str, max_ndim: int = 3) -> list[SampleCall]:
    """One call per rank of the first tensor, as far as a call can be made up."""
    found = []
    for ndim in range(1, max_ndim + 1):
        calls = (call for func in functions_of(op_name) for call in _candidates(func, ndim))
        call = next((c for c in calls if _is_accepted(c)), None)
        if call is not None:
            found.append(call)
    return found


def _candidates(func: Callable[..., Any], ndim: int) -> Iterator[SampleCall]:
    names = _required_parameters(func)
    if names is None:
        return
    tensors = [name for name in names if name not in _VALUES]
    fewer = [n for n in (2, 1) if n != ndim]
    # The first tensor has the wanted rank; the others that of the first, or, like a weight or a bias, 2 or 1.
    for ranks in itertools.product(*[[ndim] if i == 0 else [ndim, *fewer] for i in range(len(tensors))]):
        rank = dict(zip(tensors, ranks, strict=True))
        yield SampleCall(func, {n: _VALUES[n] if n in _VALUES else _tensor(n, rank[n]) for n in names}, ndim)


def _required_parameters(func: Callable[..., Any]) -> list[str] | None:
    """Names of the parameters without a default, the first of which is a tensor; None when they cannot be told."""
    if (name := getattr(func, "__name__", "")) in _PARAMETERS:
        return list(_PARAMETERS[name])
    schema = getattr(getattr(func, "default", func), "_schema", None)
    if schema is not None:
        return [argument.name for argument in schema.arguments if not argument.has_default_value()]
    described = _overrides().get(func)
    if described is None:
        return None
    parameters = inspect.signature(described).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _overrides() -> dict[Callable[..., Any], Callable[..., Any]]:
    return get_testing_overrides()  # cached by torch


def _tensor(name: str, ndim: int) -> Any:
    shape = (SIZE,) * ndim
    if name in _LISTS_OF_TENSORS:
        return [torch.empty(shape, device="meta") for _ in range(2)]
    if name in _INTEGER_TENSORS:
        return torch.empty(shape, dtype=torch.int64, device="meta")
    if name in _BOOLEAN_TENSORS:
        return torch.empty(shape, dtype=torch.bool, device="meta")
    return torch.empty(shape, device="meta")


def _is_accepted(call: SampleCall) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about this call, which nobody wrote
        try:
            call.func(*call.arguments.values())
        except Exception:
            return False
    return True


def _shown(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{name}{list(value.shape)}"
    if isinstance(value, list):
        return f"{name}=[{', '.join(str(list(v.shape)) for v in value)}]"
    return f"{name}={value}"
