"""Tensors that know how their numbers are made, and record what is done to them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hyper_parallel import torch_compat
from hyper_parallel.checkpoint.deferred.rules import OVERWRITES, SAME, draws, result_of, view_of
from hyper_parallel.checkpoint.deferred.values import (
    DeferredValue,
    DrawnValue,
    FilledValue,
    KnownValue,
    WrittenValue,
)
from hyper_parallel.torch_compat import pytree

__all__ = ["DeferredTensor", "Scratch", "deferred", "draw_into", "run_deferred", "value_of", "without_memory"]


class _SharedValue:
    """The value of a tensor and of all its views, which writing changes."""

    def __init__(self, value: DeferredValue) -> None:
        self.value = value


class _ViewStep(NamedTuple):
    """One step from a tensor to a view of it.

    Attributes:
        func, args, kwargs: the call; the first argument, the tensor, is left out.
        which: of its results; None for an operator with one.
        result: a tensor without memory of its shape.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    which: int | None
    result: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        found: Any = self.func(tensor, *self.args, **self.kwargs)
        view: torch.Tensor = found if self.which is None else found[self.which]
        return view


class DeferredTensor(torch.Tensor):
    """A tensor without numbers in memory. What is done to it is recorded; :func:`value_of` tells how it is made.

    An operator that needs the numbers at once (``item``, one that writes into a tensor in memory) makes them whole.
    """

    cell: _SharedValue
    steps: tuple[_ViewStep, ...]  # that made this one of the cell's tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_compat.DisableTorchFunction():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_deferred(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


class Scratch:
    """Memory for one tensor after the other. If each had its own, what small things stay between them would keep a heap
    from giving it back."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, strides and dtype, until the next one is asked for."""
        elements = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        nbytes = elements * tensor.dtype.itemsize
        if nbytes > self._memory.numel():
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(tensor.dtype).as_strided(tuple(tensor.shape), tensor.stride())


def deferred(
    value: DeferredValue, like: torch.Tensor | None = None, cell: _SharedValue | None = None
) -> DeferredTensor:
    """A tensor of a value.

    Args:
        value: how it is made.
        like: a tensor without memory that has its strides; None: contiguous.
        cell: of the tensor that it is a view of.
    """
    like = torch.empty(value.shape, dtype=value.dtype, device="meta") if like is None else like
    tensor: DeferredTensor = torch_compat.make_wrapper_subclass(
        DeferredTensor, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
    )
    tensor.cell, tensor.steps = cell or _SharedValue(value), ()
    return tensor


def value_of(tensor: torch.Tensor) -> DeferredValue:
    """How a tensor's numbers are made, as things are now."""
    if not isinstance(tensor, DeferredTensor):
        return KnownValue(tensor.detach())
    value = tensor.cell.value
    for view in tensor.steps:
        value = view_of(view.func, (value, *view.args), view.kwargs, view.result, view.which)
    return value


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device of the same shape, strides and dtype."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def run_deferred(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, scratch: Scratch | None = None) -> Any:
    """An operator on arguments of which some are deferred, or one that makes a tensor that is to be.

    Args:
        scratch: for one that draws: where to draw numbers that are forgotten, after which the generator is in the state
            in which drawing leaves it. None: do not draw.
    """
    try:
        on_meta = _on_meta(func, args, kwargs)
    except Exception:  # it needs the numbers, or is wrong; then it raises again
        return func(*_in_memory(args), **_in_memory(kwargs))
    if func._schema.is_mutable:
        return _written(func, args, kwargs, scratch)
    if func.is_view:
        return _viewed(func, args, kwargs, on_meta)
    values = (_values(args), _values(_at_once(func, kwargs, on_meta)))

    def made(result: Any, index: int | None) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        return deferred(result_of(func, *values, result, index), result)

    results = _each(on_meta, made)
    if scratch is not None and draws(func):
        func(*_in_memory(args), **_in_memory(kwargs))
    return results


def _each(results: Any, change: Any) -> Any:
    if isinstance(results, (list, tuple)):
        return type(results)([change(result, index) for index, result in enumerate(results)])
    return change(results, None)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """What the call gives, without memory; for shapes, strides and dtypes."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, without_memory, (args, kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*args, **kwargs)


def _at_once(func: Any, kwargs: dict[str, Any], on_meta: Any) -> dict[str, Any]:
    """The default dtype may be another one when the numbers are made."""
    takes = any(argument.name == "dtype" for argument in func._schema.arguments)
    if takes and kwargs.get("dtype") is None and isinstance(on_meta, torch.Tensor):
        return {**kwargs, "dtype": on_meta.dtype}
    return kwargs


def _values(nested: Any) -> Any:
    """Arguments with values in the place of tensors; what is in memory is copied, as it may be written later."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: value_of(t) if isinstance(t, DeferredTensor) else KnownValue(t.detach().clone()), nested
    )


def _in_memory(nested: Any) -> Any:
    return pytree.tree_map_only(DeferredTensor, lambda t: value_of(t).whole().clone(), nested)


def _viewed(func: Any, args: Sequence[Any], kwargs: dict[str, Any], on_meta: Any) -> Any:
    source, *rest = args
    if not isinstance(source, DeferredTensor):  # of one that is in memory, by an index that is deferred
        return func(*_in_memory(args), **_in_memory(kwargs))

    def view(result: torch.Tensor, index: int | None) -> DeferredTensor:
        tensor = deferred(source.cell.value, result, source.cell)
        step = _ViewStep(func, tuple(rest), kwargs, index, result)
        tensor.steps = source.steps if func.overloadpacket.__name__ in SAME else (*source.steps, step)
        return tensor

    return _each(on_meta, view)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], scratch: Scratch | None) -> Any:
    target, *rest = args
    if not isinstance(target, DeferredTensor) or not func.overloadpacket.__name__.endswith("_"):
        return func(*_in_memory(args), **_in_memory(kwargs))
    overwrites = func.overloadpacket.__name__ in OVERWRITES or draws(func)
    before = KnownValue(torch.empty(0)) if overwrites else value_of(target)
    value = result_of(func, (before, *_values(rest)), _values(kwargs), without_memory(target), None)
    if scratch is not None and draws(func):
        func(scratch.like(target), *rest, **kwargs)
    _set(target, value)
    return target


def draw_into(func: Any, target: DeferredTensor, args: Any, kwargs: dict[str, Any], scratch: Scratch | None) -> Any:
    """Record a function that fills its first argument with what it draws, however it does that."""
    shape, dtype = tuple(target.shape), target.dtype
    there = functools.partial(torch.empty_strided, shape, target.stride(), dtype=dtype)
    value = DrawnValue(shape, dtype, func, (FilledValue(shape, dtype, lambda _: there()), *args), kwargs)
    if scratch is not None:
        func(scratch.like(target), *args, **kwargs)
    _set(target, value)
    return target


def _set(target: DeferredTensor, value: DeferredValue) -> None:
    """Give a tensor, which may be a view, another value."""
    if target.steps:
        value = WrittenValue(target.cell.value, _through(target.steps), value)
    target.cell.value = value


def _through(views: Sequence[_ViewStep]) -> Any:
    def view(whole: torch.Tensor) -> torch.Tensor:
        for step in views:
            whole = step.of(whole)
        return whole

    return view
