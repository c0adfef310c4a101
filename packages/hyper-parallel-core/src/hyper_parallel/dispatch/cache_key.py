"""The cache key of a call: specs of DTensors by identity, who needs a gradient, other arguments by value or type."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.dispatch.arguments import counts_as_replica
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.utils.structures import rebuilt

_BY_VALUE: frozenset[Any] = frozenset(
    [bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout]
)
_WITH_INTS = _BY_VALUE | {int}
ALL_BY_VALUE = _WITH_INTS | {float}
_BOUNDS = frozenset([int, type(None)])


def kinds_by_value(ints: bool, floats: bool) -> frozenset[Any]:
    """The types whose values are part of the key of an operator, by which numbers can change its layouts: ints, or ints
    and floats."""
    return ALL_BY_VALUE if floats else _WITH_INTS if ints else _BY_VALUE


def scan(values: Any, key: list[Any], local: list[Any], grad: bool, by_value: frozenset[Any]) -> bool:
    """Append the cache key and the local form of each value.

    Args:
        grad: whether gradients are on, so that it matters who needs one.
        by_value: the types of which the value counts.

    Returns:
        whether a plain tensor was met that does not count as a replica; no key says how it is laid out.
    """
    loose = False
    for value in values:
        kind = value.__class__
        if kind is DTensor:
            tensor = value._local if value._pending is None else value._resolve()
            key.append(value._spec)
            if grad:
                key.append(tensor.requires_grad)
            local.append(tensor)
        elif kind in by_value:
            key.append(kind)
            key.append(value)
            local.append(value)
        elif kind is int or kind is float:
            key.append(kind)
            local.append(value)
        elif kind is slice:
            bounds = (value.start, value.stop, value.step)
            value = value if _BOUNDS.issuperset(map(type, bounds)) else _with_read_bounds(bounds)
            key += (kind, value.start, value.stop, value.step)
            local.append(value)
        elif isinstance(value, (tuple, list)):
            key.append(kind)
            key.append(len(value))
            inner: list[Any] = []
            loose |= scan(value, key, inner, grad, by_value)
            local.append(inner if kind is list else tuple(inner) if kind is tuple else rebuilt(value, inner))
        elif not isinstance(value, torch.Tensor):
            key.append(kind)
            # What cannot be hashed cannot be looked up again: such a call makes its plan anew.
            key.append(value if getattr(value, "__hash__", None) else object())
            local.append(value)
        elif counts_as_replica(value, grad):
            key += (kind, value.shape, value.stride(), value.dtype, grad and value.requires_grad)
            local.append(value)
        else:
            loose = True
            local.append(value)
    return loose


def _with_read_bounds(bounds: tuple[Any, ...]) -> slice:
    """A slice with tensors as bounds, read: the layout of the result depends on their values."""
    return slice(*(int(b) if isinstance(b, torch.Tensor) else b for b in bounds))
