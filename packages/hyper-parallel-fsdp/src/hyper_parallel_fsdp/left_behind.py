"""Tensors that a forward leaves beside its output, where a loss may read them: in attributes, containers, objects,
closures and global variables (the auxiliary loss of a router, say)."""

from __future__ import annotations

import builtins
import dis
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_ATOMS = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type})
_OPAQUE = (nn.Module, ModuleType, type, torch.Generator)  # the tensors of modules are looked for from each of them
_NOT_OURS = ("torch.distributed", "torch.cuda", "torch._", "torch.fx", "hyper_parallel")
_INTERNAL = frozenset(nn.Module().__dict__) - {"_buffers", "_forward_hooks", "_forward_pre_hooks"}
_BUILTINS = frozenset(vars(builtins))
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MOST = 4096
"""Elements of one container that are looked at, the last ones; what a forward adds comes last."""


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from these values without going into a module."""
    seen: set[int] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif id(value) not in seen and not isinstance(value, _OPAQUE):
            seen.add(id(value))
            stack += [v for v in _inside(value) if type(v) not in _ATOMS]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(islice(reversed(list(value.values())), _MOST))
    if isinstance(value, _CONTAINERS):
        return value if len(value) <= _MOST else list(value)[-_MOST:]
    if isinstance(value, FunctionType):
        return [place() for place in _places_of(value)]
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if type(value).__module__.startswith(_NOT_OURS):
        return ()
    return [*getattr(value, "__dict__", {}).values(), *_slots(value)]


def _slots(value: Any) -> list[Any]:
    names = [name for cls in type(value).__mro__ for name in _as_tuple(vars(cls).get("__slots__", ()))]
    return [getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)]


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


class LeftBehind:
    """Where the forwards of some modules may leave tensors.

    Args:
        modules: the modules, each by itself.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._attributes = [m.__dict__ for m in modules]
        classes = dict.fromkeys(cls for m in modules for cls in type(m).__mro__ if _is_users(cls))
        self._places = [place for cls in classes for member in vars(cls).values() for place in _places_in(member)]

    def tensors(self, more: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Those that are there now, and those in ``more``."""
        held = [v for each in self._attributes for k, v in each.items() if k not in _INTERNAL and type(v) not in _ATOMS]
        placed = [v for place in self._places if type(v := place()) not in _ATOMS]
        return tensors_in([*held, *placed, *more])


def _is_users(cls: type) -> bool:
    return issubclass(cls, nn.Module) and not cls.__module__.startswith(("torch.", *_NOT_OURS))


def _places_in(member: Any) -> Iterable[Any]:
    """Of a class: its containers, and what its methods refer to."""
    if isinstance(member, FunctionType):
        return _places_of(member)
    return (lambda: member,) if isinstance(member, (list, set, deque, dict)) else ()


def _places_of(function: FunctionType) -> list[Any]:
    """The variables that a function refers to, closure and globals; each is a function that gives its value."""
    if function.__module__ is None or function.__module__.startswith(("torch.", *_NOT_OURS)):
        return []
    variables = function.__globals__
    names = [n for n in _global_names(function.__code__) if _may_hold(variables.get(n))]
    cells = [functools.partial(_content, cell) for cell in function.__closure__ or ()]
    return [*cells, *(functools.partial(variables.get, name) for name in names)]


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    used = ("LOAD_GLOBAL", "STORE_GLOBAL")
    return tuple({each.argval for each in dis.get_instructions(code) if each.opname in used} - _BUILTINS)


def _may_hold(value: Any) -> bool:
    return value is None or isinstance(value, (torch.Tensor, list, set, deque, dict, FunctionType))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None
