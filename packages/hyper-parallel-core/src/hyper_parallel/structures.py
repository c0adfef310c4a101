"""Walk through the lists, tuples and named tuples in which tensors come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def change_values(
    module: torch.nn.Module, output: Any, changes: Sequence[Callable[[torch.nn.Module, Any], Any] | None], who: str
) -> Any:
    """What a module returned, with its first values changed: a tensor, or those of a tuple, list or mapping.

    Args:
        output: what it returned.
        changes: one per value, called with the module and the value; None leaves it as it is.
        who: who asks for the changes, for the message.

    Raises:
        ValueError: there are fewer values.
    """
    single = isinstance(output, torch.Tensor) or not isinstance(output, (tuple, list, Mapping))
    values = [output] if single else list(output.values() if isinstance(output, Mapping) else output)
    if len(values) < len(changes):
        raise ValueError(f"{type(module).__name__}: {who} lays out {len(changes)} outputs, it returned {len(values)}")
    for index, change in enumerate(changes):
        if change is not None:
            values[index] = change(module, values[index])
    if single:
        return values[0]
    if isinstance(output, Mapping):
        named = dict(zip(output, values, strict=True))
        return named if type(output) is dict else type(output)(**named)
    return rebuilt(output, values)
