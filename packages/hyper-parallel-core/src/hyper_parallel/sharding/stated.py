"""What a spec states of the local tensor: shape, dtype, and how it lies in memory.

A view of the global tensor is one of every piece, and a copy is one of every piece, only while the pieces lie as the
stride says: what follows without a gap in the global tensor does so in the piece, what repeats repeats, and the dims
have one order. The piece of a tensor without gaps has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.spec import Spec, contiguous_stride, inverse, tells_order

__all__ = ["as_stated", "difference", "stride_of_whole"]


def difference(local: Any, spec: Spec) -> str | None:
    """In what a local tensor is not what its spec states, as ``"stride (3, 1), stated (2, 1)"``; None where it is."""
    if not isinstance(local, torch.Tensor):
        return f"a {type(local).__name__}, stated a tensor"
    if local.dtype is not spec.dtype:
        return f"dtype {local.dtype}, stated {spec.dtype}"
    if tuple(local.shape) != spec.local_shape:
        return f"shape {tuple(local.shape)}, stated {spec.local_shape}"
    stated = _stated_stride(local, spec)
    return None if stated is None else f"stride {local.stride()}, stated {stated}"


def as_stated(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor itself where it lies in memory as its spec states, else a copy that does."""
    if local.layout is not torch.strided:  # a sparse gradient
        return local
    order = spec.memory_order
    if order is None and local.is_contiguous() and spec.stride == spec.dense_stride:  # the common case, seen at once
        return local
    if _stated_stride(local, spec) is None:
        return local
    if order is None:
        return local.contiguous()
    return local.permute(order).contiguous().permute(inverse(order))


def stride_of_whole(local: torch.Tensor, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Stride of the tensor of ``shape`` of which ``local`` is a piece, with its gaps; contiguous where some rank's
    piece would not tell."""
    if local.is_contiguous() or not tells_order(layout, shape):
        return contiguous_stride(shape)
    stride = [1] * local.ndim
    block = parts = 1  # of memory inside, and over how many ranks the dims inside are spread
    for dim in sorted(range(local.ndim), key=local.stride):
        stride[dim] = local.stride(dim) * parts if shape[dim] > 1 else block
        block = max(block, stride[dim] * shape[dim])
        parts *= max(shape[dim], 1) // max(local.shape[dim], 1)
    return tuple(stride)


def _stated_stride(local: torch.Tensor, spec: Spec) -> tuple[int | None, ...] | None:
    """The stride that a local tensor of this shape should have, None for a dim of which it means nothing; None instead
    when it has it."""
    sizes, have = local.size(), local.stride()
    if 0 in sizes:
        return None
    stated: list[int | None] = [None] * len(sizes)
    inner: int | None = None  # the dim that lies inside of the one in question, of the whole tensor
    block: int | None = 1  # how much of the local tensor's memory that dim goes through; None if nothing tells
    fits = True
    for dim in sorted(range(len(sizes)), key=lambda d: (spec.stride[d], -d)):
        step, size = spec.stride[dim], spec.shape[dim]
        if size == 1:
            continue
        if step == 0:
            stated[dim] = 0
        else:
            whole = 1 if inner is None else spec.stride[inner] * spec.shape[inner]
            stated[dim] = local_step = _step(step, whole, block, have[dim] if sizes[dim] > 1 else None)
            block = None if local_step is None else local_step * sizes[dim]
            inner = dim
        fits = fits and (sizes[dim] == 1 or stated[dim] is None or stated[dim] == have[dim])
    return None if fits else tuple(stated)


def _step(step: int, whole: int, block: int | None, have: int | None) -> int | None:
    """The local step along a dim, of ``step`` in the whole tensor, in which the dims inside go through ``whole`` and in
    the local tensor through ``block``; ``have`` where any step would be right."""
    if step == whole:
        return have if block is None else block
    if step > whole and block is not None and have is not None:
        return max(have, block)  # a gap, as large as the view that left it made it
    return have
