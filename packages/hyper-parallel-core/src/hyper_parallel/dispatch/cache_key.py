"""The cache key of a call: specs of DTensors by identity, who needs a gradient, other arguments by value or type."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.dispatch.arguments import counts_as_replica
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.utils.structures import rebuilt

_BY_VALUE = frozenset([bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout])

_INDEX = frozenset([int, type(None)])


def scan(values: Any, key: list[Any], local: list[Any], grad: bool, by_value: int) -> bool:
    """Append the cache key and the local form of each value.

    Returns:
        whether a plain tensor was met that does not count as a replica; the rest was then left out.
    """
    for value in values:
        kind = value.__class__
        if kind is DTensor:
            tensor = value._local if value._pending is None else value._resolve()
            key.append(value._spec)
            if grad:
                key.append(tensor.requires_grad)
            local.append(tensor)
        elif kind is int:
            key.append(kind)
            if by_value:
                key.append(value)
            local.append(value)
        elif kind is float:
            key.append(kind)
            if by_value == 2:
                key.append(value)
            local.append(value)
        elif kind in _BY_VALUE:
            key.append(kind)
            key.append(value)
            local.append(value)
        elif kind is slice:
            bounds = [value.start, value.stop, value.step]
            if not _INDEX.issuperset(map(type, bounds)):
                # A tensor as bound is read here: the layout of the result depends on its value.
                bounds = [int(b) if isinstance(b, torch.Tensor) else b for b in bounds]
                value = slice(*bounds)
            key.append(kind)
            key.extend(bounds)
            local.append(value)
        elif isinstance(value, (tuple, list)):
            key.append(kind)
            key.append(len(value))
            inner: list[Any] = []
            if scan(value, key, inner, grad, by_value):
                return True
            local.append(inner if kind is list else tuple(inner) if kind is tuple else rebuilt(value, inner))
        elif isinstance(value, torch.Tensor):  # a plain one
            if not counts_as_replica(value, grad):
                return True
            key += (kind, value.shape, value.stride(), value.dtype, grad and value.requires_grad)
            local.append(value)
        else:
            key.append(kind)
            # What cannot be hashed cannot be looked up again: such a call makes its plan anew.
            key.append(value if getattr(value, "__hash__", None) else object())
            local.append(value)
    return False
