"""Walk through the structures in which tensors come: arguments of operators, and what modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def rebuilt(like: Any, items: Iterable[Any]) -> Any:
    """A list, tuple or named tuple with other items."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """An operator's argument with ``change`` applied to every tensor in it; there are tensors in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return rebuilt(value, (map_tensors(v, change) for v in value))
    return value


# -- what modules take and return ----------------------------------------------------------------------------------


def parts_of(value: Any) -> list[Any] | None:
    """The values in a list, tuple, mapping or dataclass; None for anything else."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping):  # also the ModelOutput of transformers, which is a dataclass too
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _fields(value)]
    return None


def _fields(value: Any) -> list[str]:
    """Names of the fields of a dataclass that have a value."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def with_parts(like: Any, parts: Sequence[Any]) -> Any:
    """A list, tuple, mapping or dataclass of the same kind with other values.

    Raises:
        TypeError: for a mapping that cannot be copied and written to.
    """
    if isinstance(like, (list, tuple)):
        return rebuilt(like, parts)
    if type(like) is dict:
        return dict(zip(like, parts, strict=True))
    if isinstance(like, Mapping):
        return _with_values(like, parts)
    copied = copy.copy(like)
    for name, part in zip(_fields(like), parts, strict=True):
        object.__setattr__(copied, name, part)  # it may be frozen
    return copied


def _with_values(like: Mapping[Any, Any], values: Sequence[Any]) -> Any:
    try:
        copied: Any = copy.copy(like)
        for key, value in zip(like, values, strict=True):
            copied[key] = value
    except TypeError as error:
        raise TypeError(
            f"tensors in a {type(like).__name__} are to be laid out anew, and it cannot be copied and written to "
            f"({error}); a module should take and return a dict instead"
        ) from error
    return copied


def map_structure(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A structure with ``change`` applied to every tensor in it; the same object where that changes nothing."""
    if isinstance(value, torch.Tensor):
        return change(value)
    parts = parts_of(value)
    if parts is None:
        return value
    changed = [map_structure(part, change) for part in parts]
    return value if all(a is b for a, b in zip(parts, changed, strict=True)) else with_parts(value, changed)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a structure."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in parts_of(value) or ():
            yield from tensors_of(part)


def change_values(
    module: torch.nn.Module, output: Any, changes: Sequence[Callable[[torch.nn.Module, Any], Any] | None], who: str
) -> Any:
    """What a module returned, with its first values changed: a tensor, or those of a tuple, list, mapping or dataclass.

    Args:
        output: what it returned.
        changes: one per value, called with the module and the value; None leaves it as it is.
        who: who asks for the changes, for the message.

    Raises:
        ValueError: there are fewer values.
    """
    parts = None if isinstance(output, torch.Tensor) else parts_of(output)
    values = [output] if parts is None else parts
    if len(values) < len(changes):
        raise ValueError(f"{type(module).__name__}: {who} lays out {len(changes)} outputs, it returned {len(values)}")
    for index, change in enumerate(changes):
        if change is not None:
            values[index] = change(module, values[index])
    return values[0] if parts is None else with_parts(output, values)
