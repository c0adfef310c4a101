"""The cache key of a call: specs of DTensors by identity, who needs a gradient, other arguments by value or type."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.arguments import counts_as_replica
from hyper_parallel.dtensor import DTensor, reduced_form
from hyper_parallel.structures import rebuilt

PLAIN, REDUCED = 1, 2
_BY_VALUE = frozenset([bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout])


def scan(values: Any, key: list[Any], local: list[Any], grad: bool, by_value: int, use_reduced: bool) -> int:
    """Append the cache key and the local form of each value.

    Returns:
        0, or at once what was met: a plain tensor that does not count as a replica, or a pending sum that was
            reduced once
        (the operator then takes the reduced form, so that no second reduction follows).
    """
    for value in values:
        kind = value.__class__
        if kind is DTensor:
            if use_reduced and value._reduced is not None and reduced_form(value) is not value:
                return REDUCED
            tensor = value._local if value._pending is None else value._resolve()
            key.append(value._spec)
            if grad:
                key.append(tensor.requires_grad)
            local.append(tensor)
        elif kind is float:
            key.append(kind)
            if by_value == 2:
                key.append(value)
            local.append(value)
        elif kind is int:
            key.append(kind)
            if by_value:
                key.append(value)
            local.append(value)
        elif kind in _BY_VALUE:
            key.append(kind)
            key.append(value)
            local.append(value)
        elif isinstance(value, (tuple, list)):
            key.append(kind)
            key.append(len(value))
            inner: list[Any] = []
            met = scan(value, key, inner, grad, by_value, use_reduced)
            if met:
                return met
            local.append(inner if kind is list else tuple(inner) if kind is tuple else rebuilt(value, inner))
        elif isinstance(value, torch.Tensor):  # a plain one
            if not counts_as_replica(value, grad):
                return PLAIN
            key += (kind, value.shape, value.stride(), value.dtype, grad and value.requires_grad)
            local.append(value)
        elif kind is slice:
            key.append(kind)
            # A tensor as bound is read here: the layout of the result depends on its value.
            bounds = [int(b) if isinstance(b, torch.Tensor) else b for b in (value.start, value.stop, value.step)]
            key.extend(bounds)
            local.append(slice(*bounds))
        else:
            key.append(kind)
            # What cannot be hashed cannot be looked up again: such a call makes its plan anew.
            key.append(value if getattr(value, "__hash__", None) else object())
            local.append(value)
    return 0
