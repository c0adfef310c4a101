"""How what an operator gives is made from blocks of what it was given."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hyper_parallel.checkpoint.deferred.values import (
    Bounds,
    ComputedValue,
    CutValue,
    DeferredValue,
    DrawnValue,
    ExpandedValue,
    FilledValue,
    JoinedValue,
    PermutedValue,
    PointwiseValue,
    ReshapedValue,
)

__all__ = ["OVERWRITES", "SAME", "draws", "result_of", "view_of"]

OVERWRITES = {"zero_", "fill_", "copy_"}
"""In-place operators whose result does not depend on what was there, besides those that draw."""

SAME = {"detach", "alias", "lift_fresh"}
"""Operators that give their argument again."""

_IN_ORDER = {"view", "_unsafe_view", "unsqueeze", "squeeze", "reshape", "flatten", "unflatten", "_reshape_alias"}
_ELEMENTWISE = {"_to_copy", "clone", *OVERWRITES}
_ANYTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


def draws(func: Any) -> bool:
    """Whether an operator takes numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def view_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor, index: int | None
) -> DeferredValue:
    """What an operator shows of its first argument.

    Args:
        func: an operator that gives views.
        args, kwargs: its arguments, with values in the place of tensors.
        result: one of its results, without memory.
        index: which one; None for an operator with one.
    """
    source: DeferredValue = args[0]
    name, given = func.overloadpacket.__name__, _by_name(func, args, kwargs)
    shape = tuple(result.shape)
    if name in _IN_ORDER and func is not torch.ops.aten.view.dtype:
        return ReshapedValue(source, shape)
    if name == "expand":
        return ExpandedValue(source, shape)
    if name in ("permute", "transpose", "t", "numpy_T", "mT"):
        return PermutedValue(source, _order(name, given, len(source.shape)))
    bounds = _cut(name, given, source.shape, index)
    if bounds is not None:
        part = CutValue(source, bounds)
        return part if part.shape == shape else ReshapedValue(part, shape)
    return ComputedValue(shape, result.dtype, func, args, kwargs, index)


def result_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor, index: int | None
) -> DeferredValue:
    """What an operator gives that is no view; arguments as for :func:`view_of`. Of an in-place operator, what its first
    argument becomes."""
    name, shape, dtype = func.overloadpacket.__name__, tuple(result.shape), result.dtype
    in_place = func._schema.is_mutable
    if name in _ANYTHING:
        return FilledValue(shape, dtype, functools.partial(torch.empty, dtype=dtype))
    if name in _FILLS:
        return FilledValue(shape, dtype, functools.partial(torch.full, fill_value=_FILLS[name], dtype=dtype))
    if name in ("full", "full_like", "new_full"):
        fill = _by_name(func, args, kwargs)["fill_value"]
        return FilledValue(shape, dtype, functools.partial(torch.full, fill_value=fill, dtype=dtype))
    if in_place and draws(func):  # in the order of the strides
        there = functools.partial(torch.empty_strided, shape, result.stride(), dtype=dtype)
        args = (FilledValue(shape, dtype, lambda _: there()), *args[1:])
    elif name in OVERWRITES:
        args = (FilledValue(shape, dtype, functools.partial(torch.empty, dtype=dtype)), *args[1:])
    if draws(func):
        return DrawnValue(shape, dtype, func, args, kwargs, index)
    if name in _ELEMENTWISE or torch.Tag.pointwise in func.tags:
        return PointwiseValue(shape, dtype, func, args, kwargs, in_place=in_place)
    if name in _IN_ORDER:
        return ReshapedValue(args[0], shape)
    if name in ("cat", "stack"):
        return _joined(name, shape, dtype, _by_name(func, args, kwargs))
    return ComputedValue(shape, dtype, func, args, kwargs, index)


def _joined(name: str, shape: tuple[int, ...], dtype: torch.dtype, given: Mapping[str, Any]) -> DeferredValue:
    parts, dim = given["tensors"], given["dim"] % len(shape)
    if name == "stack":
        parts = [ReshapedValue(part, (*part.shape[:dim], 1, *part.shape[dim:])) for part in parts]
    parts = [part for part in parts if len(part.shape) == len(shape)]  # cat passes over tensors of shape (0,)
    return JoinedValue(shape, dtype, parts, dim)


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with its defaults."""
    found = {argument.name: argument.default_value for argument in func._schema.arguments}
    found.update(zip(found, args, strict=False))
    return {**found, **kwargs}


def _order(name: str, given: Mapping[str, Any], ndim: int) -> list[int]:
    order = list(range(ndim))
    if name == "permute":
        return [d % ndim for d in given["dims"]]
    if name == "numpy_T" or ndim < 2:
        return order[::-1]
    first, second = (given["dim0"], given["dim1"]) if name == "transpose" else (-2, -1)
    order[first], order[second] = order[second], order[first]
    return order


def _cut(name: str, given: Mapping[str, Any], shape: tuple[int, ...], index: int | None) -> Bounds | None:
    """The part that a view is of the whole; None when it is no block."""
    if name not in ("slice", "select", "split", "split_with_sizes", "unbind", "narrow") or not shape:
        return None
    dim = given["dim"] % len(shape)
    size = shape[dim]
    if name == "select":
        start = given["index"] % size
        stop = start + 1
    elif name == "unbind":
        assert index is not None
        start, stop = index, index + 1
    elif name == "narrow":
        start = given["start"] % size if size else 0
        stop = start + given["length"]
    elif name == "slice":
        if given["step"] != 1:
            return None
        start, stop, _ = slice(given["start"], given["end"]).indices(size)
        stop = max(start, stop)
    else:
        assert index is not None
        sizes: Any = given["split_sizes" if "split_sizes" in given else "split_size"]
        if isinstance(sizes, int):
            start, stop = index * sizes, min((index + 1) * sizes, size)
        else:
            start = sum(sizes[:index])
            stop = start + sizes[index]
    whole = [(0, n) for n in shape]
    whole[dim] = (start, stop)
    return tuple(whole)
