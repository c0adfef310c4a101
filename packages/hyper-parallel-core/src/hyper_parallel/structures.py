"""Walk through the lists, tuples and named tuples in which tensors come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


def rebuilt(like: Any, items: Iterable[Any]) -> Any:
    """A list, tuple or named tuple with other items."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """An argument with ``change`` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return rebuilt(value, (map_tensors(v, change) for v in value))
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a structure of lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        yield from tensors_of(list(value.values()))
