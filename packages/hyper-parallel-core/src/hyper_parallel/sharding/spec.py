"""Spec: everything a DTensor knows beside its local tensor, as one interned value.

Equal specs are the same object, so the dispatcher's cache compares them by identity.

The stride is that of the same tensor on one device, whatever layouts it went through: it decides, equally on all ranks,
what is a view and what is a copy. Every local tensor has its dims in the order that the stride says, so that what is a
view of the global tensor is one of each piece. The stride of a piece itself cannot tell: where a dim has one element
left, or none, any order fits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import PackedShard, Partial, Placement, Replicate, is_partial
from hyper_parallel.sharding.shard_ranges import local_shape

NOT_VARYING: frozenset[int] = frozenset()


class TensorMeta(NamedTuple):
    """What a wrapper is made from (see :mod:`hyper_parallel.tensor.wrapper`)."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Spec:
    """Layout, global shape, stride and dtype of a DTensor, and the gradient type of its Replicate axes.

    Attributes:
        varying: mesh axes on which the tensor is Replicate while its gradient is Partial: the ranks hold terms that
            sum to the gradient. On every other Replicate axis the gradient is equal and complete on each rank.
    """

    __slots__ = (
        "__weakref__", "_dense", "_meta", "_order", "dtype", "layout", "moves", "shape", "stride", "tensor_meta",
        "varying",
    )  # fmt: skip

    layout: Layout
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    varying: frozenset[int]
    tensor_meta: TensorMeta
    # What brings a tensor from this spec to another (see redistribute.Redistribution).
    moves: dict[Spec, Any]
    _meta: torch.Tensor | None
    _dense: tuple[int, ...] | None
    _order: tuple[int, ...] | None

    def replace(self, **changes: Any) -> Spec:
        """The spec with some fields changed."""
        fields = {name: getattr(self, name) for name in ("layout", "shape", "stride", "dtype", "varying")}
        return make_spec(**(fields | changes))

    @property
    def meta(self) -> torch.Tensor:
        """A meta tensor of the global shape, stride and dtype, for shape inference."""
        if self._meta is None:
            self._meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return self._meta

    @property
    def dense_stride(self) -> tuple[int, ...]:
        """Stride of a copy without gaps and repeats, as ``clone()`` makes it: the dims keep their order in memory."""
        if self._dense is None:
            is_plain = self.stride == contiguous_stride(self.shape)
            self._dense = self.stride if is_plain else torch.empty_like(self.meta).stride()
            if not is_plain:
                self._order = memory_order(self._dense)
        return self._dense

    @property
    def memory_order(self) -> tuple[int, ...] | None:
        """Dims from the outermost to the innermost in memory; None when that is the order in which they are counted."""
        return self._order if self._dense is not None or self.dense_stride else None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's local tensor."""
        return local_shape(self.layout, self.shape, self.layout.info.my_coordinate())

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self  # interned

    def __repr__(self) -> str:
        varying = f", varying over {sorted(self.varying)}" if self.varying else ""
        return f"Spec({tuple(self.shape)}, {self.dtype}, {self.layout}{varying})"


def make_spec(
    layout: Layout,
    shape: Iterable[int],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    varying: frozenset[int] = NOT_VARYING,
) -> Spec:
    """The interned spec of these parts.

    Raises:
        ValueError: the sections of a PackedShard do not add up to the dimension.
    """
    specs = layout._specs
    if not specs:
        specs = layout._specs = weakref.WeakValueDictionary()
    key = (tuple(shape), stride, dtype, varying)
    found: Spec | None = specs.get(key)
    if found is None:
        for placement in layout.placements:
            if isinstance(placement, PackedShard) and sum(placement.sections) != key[0][placement.dim]:
                raise ValueError(
                    f"the sections of {placement!r} do not add up to dim {placement.dim} of shape {key[0]}"
                )
        found = Spec()
        found.layout, found.shape, found.stride, found.dtype = layout, torch.Size(key[0]), stride, dtype
        found.varying, found._meta, found._dense, found._order = varying, None, None, None
        found.moves = {}
        found.tensor_meta = TensorMeta(found.shape, stride, dtype)
        specs[key] = found
    return found


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """Stride of a contiguous tensor of this shape."""
    stride: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def stride_like(local: torch.Tensor, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Stride of a dense tensor of ``shape`` with the dim order of its piece ``local``; contiguous where some rank's
    piece would not tell the order."""
    if local.is_contiguous() or not tells_order(layout, shape):
        return contiguous_stride(shape)
    by_step = sorted(range(local.ndim), key=local.stride)
    stride = [1] * local.ndim
    step = 1
    for dim in by_step:
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def memory_order(stride: Sequence[int]) -> tuple[int, ...] | None:
    """Dims from the outermost to the innermost in memory; None when that is the order in which they are counted."""
    order = tuple(sorted(range(len(stride)), key=lambda d: (-stride[d], d)))
    return None if order == tuple(range(len(stride))) else order


def in_memory_order(local: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor itself when its dims lie in memory in this order (see :func:`memory_order`), else a copy in it."""
    size, stride = local.size(), local.stride()
    if 0 in size:
        return local
    last = None
    for dim in range(local.ndim) if order is None else order:
        if size[dim] == 1 or stride[dim] == 0:
            continue
        if last is not None and stride[dim] > last:
            break
        last = stride[dim]
    else:
        return local
    if order is None:
        return local.contiguous()
    return local.permute(order).contiguous().permute(inverse(order))


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes this one."""
    back = [0] * len(order)
    for position, dim in enumerate(order):
        back[dim] = position
    return back


def is_even(layout: Layout, shape: Sequence[int]) -> bool:
    """Whether all ranks hold as much."""
    for axes, size in zip(layout.shard_order, shape, strict=True):
        parts = _parts(layout, axes)
        sizes = [n for a in axes if isinstance(p := layout.placements[a], PackedShard) for n in p.sections] or [size]
        if any(n % parts for n in sizes):
            return False
    return True


def tells_order(layout: Layout, shape: Sequence[int]) -> bool:
    """Whether every rank's piece has at least two elements along each dim that is sharded, so that its stride tells
    how the dims lie in memory."""
    return is_even(layout, shape) and all(
        not axes or size >= 2 * _parts(layout, axes) for axes, size in zip(layout.shard_order, shape, strict=True)
    )


def _parts(layout: Layout, axes: Sequence[int]) -> int:
    return math.prod(layout.mesh_shape[axis] for axis in axes)


def dual(layout: Layout, varying: frozenset[int]) -> tuple[Layout, frozenset[int]]:
    """Layout and varying axes of the *gradient* of a local tensor with these.

    Per axis (JAX's shard_map and ``spmd_types`` name them S, P, V, I): slices for slices; a pending sum and a varying
    replica are each other's dual; an invariant replica is its own.
    """
    found: tuple[Layout, frozenset[int]] | None = layout._dual.get(varying)
    if found is None:
        changes: dict[int, Placement] = {a: Partial() for a in varying}
        sums = {a for a, p in enumerate(layout.placements) if is_partial(p)}
        changes.update({a: Replicate() for a in sums})
        found = layout._dual[varying] = (layout.with_placements(changes), frozenset(sums))
    return found


def gradient_spec(spec: Spec, dtype: torch.dtype) -> Spec:
    """The spec of the gradient of a tensor with ``spec``; like autograd, with the dims in the tensor's order."""
    layout, varying = dual(spec.layout, spec.varying)
    return make_spec(layout, spec.shape, spec.dense_stride, dtype, varying)
