"""How a tensor's numbers are made, so that a block of them can be made without the rest.

A value knows its shape and gives any block of it. Those that follow from other values ask these for the blocks that
they need: a transposed matrix for a transposed block, a stack of experts for those that are in the block. Only what no
rule is known for is made whole, and so is what was drawn: the numbers of one tensor come from the generator one after
the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hyper_parallel.torch_compat import pytree

__all__ = [
    "Bounds",
    "ComputedValue",
    "CutValue",
    "DrawnValue",
    "ExpandedValue",
    "FilledValue",
    "JoinedValue",
    "KnownValue",
    "MadeWholeValue",
    "PermutedValue",
    "PointwiseValue",
    "ReshapedValue",
    "DeferredValue",
    "WrittenValue",
    "blocks_of",
]

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each dim."""

Make = Callable[..., Any]


class DeferredValue:
    """The numbers of a tensor.

    Attributes:
        shape, dtype: of the tensor.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    def block(self, bounds: Bounds) -> torch.Tensor:
        """The part inside of the bounds, which the caller does not write."""
        if _sharing is not None:
            return _sharing.block(self, bounds)
        with _shared_parts(self) as sharing:
            return sharing.block(self, bounds)

    def make(self, bounds: Bounds) -> torch.Tensor:
        """What :meth:`block` gives, anew."""
        raise NotImplementedError(f"{type(self).__name__} must define make")

    def inputs(self) -> list[DeferredValue]:
        """The values that it is made of."""
        return [leaf for leaf in pytree.tree_leaves(list(vars(self).values())) if isinstance(leaf, DeferredValue)]

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.block(tuple((0, n) for n in self.shape))


class KnownValue(DeferredValue):
    """A tensor that is in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor = tensor

    def make(self, bounds: Bounds) -> torch.Tensor:
        return self.tensor[_slices(bounds)]


class FilledValue(DeferredValue):
    """Every element the same, or any: made by a function of the shape."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, make: Make) -> None:
        super().__init__(shape, dtype)
        self._make = make

    def make(self, bounds: Bounds) -> torch.Tensor:
        made: torch.Tensor = self._make(_sizes(bounds))
        return made


class PointwiseValue(DeferredValue):
    """Each element computed from those in its place; arguments of other shapes are expanded."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, func: Make, args: Any, kwargs: Any, *, in_place: bool = False
    ) -> None:
        super().__init__(shape, dtype)
        self._func, self._args, self._kwargs, self._in_place = func, args, kwargs, in_place

    def make(self, bounds: Bounds) -> torch.Tensor:
        args, kwargs = _with_tensors((self._args, self._kwargs), lambda value: value.block(_expanded(value, bounds)))
        if self._in_place:
            args = (args[0].clone(), *args[1:])
        made: torch.Tensor = self._func(*args, **kwargs)
        return made


class JoinedValue(DeferredValue):
    """``torch.cat`` of values along a dim."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[DeferredValue], dim: int) -> None:
        super().__init__(shape, dtype)
        self._parts, self._dim = parts, dim

    def make(self, bounds: Bounds) -> torch.Tensor:
        start, stop = bounds[self._dim]
        found, at = [], 0
        for part in self._parts:
            low, high = max(start - at, 0), min(stop - at, part.shape[self._dim])
            if low < high:
                found.append(part.block((*bounds[: self._dim], (low, high), *bounds[self._dim + 1 :])))
            at += part.shape[self._dim]
        if len(found) == 1:
            return found[0].to(self.dtype)
        return torch.cat(found, self._dim) if found else torch.empty(_sizes(bounds), dtype=self.dtype)


class PermutedValue(DeferredValue):
    """The dims in another order."""

    def __init__(self, source: DeferredValue, dims: Sequence[int]) -> None:
        super().__init__([source.shape[d] for d in dims], source.dtype)
        self._source, self._dims = source, tuple(dims)

    def make(self, bounds: Bounds) -> torch.Tensor:
        inside = [(0, 0)] * len(bounds)
        for d, range_ in zip(self._dims, bounds, strict=True):
            inside[d] = range_
        return self._source.block(tuple(inside)).permute(self._dims)


class CutValue(DeferredValue):
    """A part of a value, with all its dims."""

    def __init__(self, source: DeferredValue, bounds: Bounds) -> None:
        super().__init__(_sizes(bounds), source.dtype)
        self._source, self._starts = source, [start for start, _ in bounds]

    def make(self, bounds: Bounds) -> torch.Tensor:
        return self._source.block(tuple((s + a, s + b) for s, (a, b) in zip(self._starts, bounds, strict=True)))


class ExpandedValue(DeferredValue):
    """As ``Tensor.expand``."""

    def __init__(self, source: DeferredValue, shape: Sequence[int]) -> None:
        super().__init__(shape, source.dtype)
        self._source = source

    def make(self, bounds: Bounds) -> torch.Tensor:
        return self._source.block(_expanded(self._source, bounds)).expand(_sizes(bounds))


class ReshapedValue(DeferredValue):
    """The same elements in the same order, in another shape.

    Dims of the two shapes correspond in groups of equal products. In each group a block is widened until it is a block
    in both shapes, which is a range of the group's elements.
    """

    def __init__(self, source: DeferredValue, shape: Sequence[int]) -> None:
        super().__init__(shape, source.dtype)
        self._source, self._groups = source, _groups(source.shape, self.shape)

    def make(self, bounds: Bounds) -> torch.Tensor:
        if any(a >= b for a, b in bounds):
            return torch.empty(_sizes(bounds), dtype=self.dtype)
        if self._groups is None:
            return self._source.whole().reshape(self.shape)[_slices(bounds)]
        before: list[tuple[int, int]] = []
        after: list[tuple[int, int]] = []
        for old, new in self._groups:
            there = tuple(bounds[len(after) : len(after) + len(new)])
            low, high = _range(new, there)
            while True:
                here = _cover(old, low, high)
                there = _cover(new, *_range(old, here))
                if _range(old, here) == _range(new, there):
                    break
                low, high = _range(new, there)
            before += here
            after += there
        wide = self._source.block(tuple(before)).reshape(_sizes(tuple(after)))
        return wide[tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(bounds, after, strict=True))]


class MadeWholeValue(DeferredValue):
    """Made all at once, however little of it is asked for."""


class ComputedValue(MadeWholeValue):
    """What a function gives for whole tensors: one of its results."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, func: Make, args: Any, kwargs: Any, index: int | None = None
    ) -> None:
        super().__init__(shape, dtype)
        self._func, self._args, self._kwargs, self._index = func, args, kwargs, index

    def make(self, bounds: Bounds) -> torch.Tensor:
        args, kwargs = _with_tensors((self._args, self._kwargs), lambda value: value.whole())
        result: Any = self._func(*args, **kwargs)
        made: torch.Tensor = result if self._index is None else result[self._index]
        return made[_slices(bounds)]


class DrawnValue(ComputedValue):
    """What a function draws from a generator that is in a certain state; the generator is left as it was."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, func: Make, args: Any, kwargs: Any, index: int | None = None
    ) -> None:
        super().__init__(shape, dtype, func, args, kwargs, index)
        self._generator: torch.Generator = kwargs.get("generator") or torch.default_generator
        self._state = self._generator.get_state()

    def make(self, bounds: Bounds) -> torch.Tensor:
        before = self._generator.get_state()
        self._generator.set_state(self._state)
        try:
            return super().make(bounds)
        finally:
            self._generator.set_state(before)


class WrittenValue(MadeWholeValue):
    """A value into a view of which another one was copied.

    Args:
        base: what was written.
        view: gives the view of a whole tensor.
        values: what was written into it.
    """

    def __init__(
        self, base: DeferredValue, view: Callable[[torch.Tensor], torch.Tensor], values: DeferredValue
    ) -> None:
        super().__init__(base.shape, base.dtype)
        self._base, self._view, self._values = base, view, values

    def make(self, bounds: Bounds) -> torch.Tensor:
        made = self._base.whole().clone()
        self._view(made).copy_(self._values.whole())
        return made[_slices(bounds)]


class _Sharing:
    """What is needed several times while one block is made: it is made once, and kept until its last use.

    Without this, an algorithm that goes on until its numbers fit, and reads the last ones twice, would make them as
    often as there are ways through it.
    """

    def __init__(self, of: DeferredValue) -> None:
        self._uses: dict[DeferredValue, int] = {}
        waiting = [of]
        while waiting:
            for part in waiting.pop().inputs():
                self._uses[part] = self._uses.get(part, 0) + 1
                if self._uses[part] == 1:
                    waiting.append(part)
        self._made: dict[tuple[DeferredValue, Bounds], torch.Tensor] = {}
        self._left: dict[tuple[DeferredValue, Bounds], int] = {}

    def block(self, value: DeferredValue, bounds: Bounds) -> torch.Tensor:
        if self._uses.get(value, 1) == 1:
            return value.make(bounds)
        whole = tuple((0, n) for n in value.shape) if isinstance(value, MadeWholeValue) else bounds
        key = (value, whole)
        if key not in self._made:
            self._made[key], self._left[key] = value.make(whole), self._uses[value]
        made = self._made[key]
        self._left[key] -= 1
        if not self._left[key]:
            del self._made[key], self._left[key]
        return made if whole == bounds else made[_slices(bounds)]


_sharing: _Sharing | None = None


@contextlib.contextmanager
def _shared_parts(of: DeferredValue) -> Iterator[_Sharing]:
    global _sharing
    _sharing = _Sharing(of)
    try:
        yield _sharing
    finally:
        _sharing = None


def blocks_of(value: DeferredValue, places: Sequence[Bounds]) -> Iterator[torch.Tensor]:
    """Several blocks of a value, which is made once where it can only be made whole."""
    whole = value.whole() if len(places) > 1 and _is_made_whole(value) else None
    for bounds in places:
        yield value.block(bounds) if whole is None else whole[_slices(bounds)]


def _is_made_whole(value: DeferredValue) -> bool:
    seen, waiting = {value}, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, MadeWholeValue):
            return True
        new = [source for source in part.inputs() if source not in seen]
        seen.update(new)
        waiting += new
    return False


def _with_tensors(nested: Any, made: Callable[[DeferredValue], torch.Tensor]) -> Any:
    return pytree.tree_map_only(DeferredValue, made, nested)


def _slices(bounds: Bounds) -> Any:
    return tuple(slice(a, b) for a, b in bounds) or ...


def _sizes(bounds: Bounds) -> tuple[int, ...]:
    return tuple(b - a for a, b in bounds)


def _expanded(value: DeferredValue, bounds: Bounds) -> Bounds:
    """Where in a value that is expanded to the shape of the bounds these lie."""
    ours = bounds[len(bounds) - len(value.shape) :]
    return tuple((0, 1) if n == 1 else range_ for n, range_ in zip(value.shape, ours, strict=True))


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """The dims of two shapes of as many elements in groups of equal products; None for shapes without elements."""
    if 0 in old:
        return None
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first, second, left, right = i, j, 1, 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new):
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append((tuple(old[first:i]), tuple(new[second:j])))
    return groups


def _range(shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Between which positions, in the order of the elements, a block lies."""
    low = high = 0
    for n, (a, b) in zip(shape, bounds, strict=True):
        low, high = low * n + a, high * n + b - 1
    return low, high + 1


def _cover(shape: Sequence[int], low: int, high: int) -> Bounds:
    """The smallest block that holds the elements between two positions, and lies in one piece."""
    bounds: list[tuple[int, int]] = []
    inner = math.prod(shape)
    for n in shape:
        inner //= n
        first, last = low // inner, (high - 1) // inner
        bounds.append((first, last + 1))
        if first != last:
            return (*bounds, *((0, m) for m in shape[len(bounds) :]))
        low, high = low - first * inner, high - first * inner
    return tuple(bounds)
