"""Tensors made on a mesh, each rank only its own piece (random ones: see :mod:`hyper_parallel.tensor.random`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.comm.redistribute import transition
from hyper_parallel.sharding.layout import Layout, as_layout_or_whole
from hyper_parallel.sharding.mesh import DeviceMesh, mesh_or_current
from hyper_parallel.sharding.placements import Partial, Placement, Replicate
from hyper_parallel.sharding.shard_ranges import local_shape
from hyper_parallel.sharding.spec import NOT_VARYING, contiguous_stride, make_spec
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.tensor.given_memory import note_leaf
from hyper_parallel.tensor.random import check_generators

__all__ = ["arange", "empty", "full", "ones", "rand", "randn", "zeros"]

Where = DeviceMesh | Layout | None


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


def _layout_of(
    device_mesh: Where, placements: Sequence[Placement] | None, shape: Sequence[int], memory: torch.layout
) -> Layout:
    if memory != torch.strided:  # which a Layout equals, where generic code hands on x.layout
        raise ValueError(f"layout={memory}: a DTensor's memory is torch.strided")
    return as_layout_or_whole(mesh_or_current(device_mesh, "a factory of DTensors"), placements, len(shape))


def _finish(local: torch.Tensor, layout: Layout, shape: tuple[int, ...], requires_grad: bool) -> DTensor:
    local.requires_grad_(requires_grad)
    note_leaf(local)
    return wrap(local, make_spec(layout, shape, contiguous_stride(shape), local.dtype))


def _local(
    make: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    memory: torch.layout,
    requires_grad: bool,
    device_mesh: Where,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """A constant: each rank makes its piece. A pending sum is the constant on the first rank, zero elsewhere."""
    layout = _layout_of(device_mesh, placements, shape, memory)
    here = layout.info.my_coordinate()
    local = make(local_shape(layout, shape, here), dtype=dtype, device=layout.info.default_device())
    if layout.is_partial():
        pending = [a for a, p in enumerate(layout.placements) if isinstance(p, Partial)]
        whole = layout.with_placements(dict.fromkeys(pending, Replicate()))
        local = transition(local, (whole, NOT_VARYING), (layout, NOT_VARYING), shape)
    return _finish(local, layout, shape, requires_grad)


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Where = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Zeros of global shape ``size``.

    Args:
        dtype, requires_grad: as of ``torch.zeros``.
        layout: of the memory; only ``torch.strided``.
        device_mesh: the mesh, by default that of the ``with mesh:`` block around; or a :class:`Layout`.
        placements: one per mesh axis; by default Replicate.
    """
    return _local(torch.zeros, _sizes(size), dtype, layout, requires_grad, device_mesh, placements)


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Where = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Ones of global shape ``size``; see :func:`zeros`."""
    return _local(torch.ones, _sizes(size), dtype, layout, requires_grad, device_mesh, placements)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Where = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Memory of global shape ``size`` as it comes; see :func:`zeros`."""
    return _local(torch.empty, _sizes(size), dtype, layout, requires_grad, device_mesh, placements)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Where = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A constant of global shape ``size``; see :func:`zeros`."""

    def make(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        return torch.full(shape, fill_value, **options)

    return _local(make, tuple(size), dtype, layout, requires_grad, device_mesh, placements)


def arange(
    *bounds: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Where = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """``torch.arange(start, end, step)`` on a mesh; see :func:`zeros`."""
    where = _layout_of(device_mesh, placements, (0,), layout)
    whole = torch.arange(*bounds, dtype=dtype, device=where.info.default_device())
    return _sliced(whole, where, requires_grad)


def _sliced(whole: torch.Tensor, layout: Layout, requires_grad: bool) -> DTensor:
    shape = tuple(whole.shape)
    local = transition(whole, (layout.replicated(), NOT_VARYING), (layout, NOT_VARYING), shape)
    return _finish(local, layout, shape, requires_grad)


def _random(
    make: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    memory: torch.layout,
    requires_grad: bool,
    device_mesh: Where,
    placements: Sequence[Placement] | None,
) -> DTensor:
    layout = _layout_of(device_mesh, placements, shape, memory)
    check_generators(layout.info)
    # The whole tensor is drawn on every rank and cut, so that each element is what one device would have drawn.
    return _sliced(make(shape, dtype=dtype, device=layout.info.default_device()), layout, requires_grad)


def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Where = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Uniform in [0, 1): the values that one device with the same seed draws, for any layout; see :func:`zeros`."""
    return _random(torch.rand, _sizes(size), dtype, layout, requires_grad, device_mesh, placements)


def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Where = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Standard normal: the values that one device with the same seed draws, for any layout; see :func:`zeros`."""
    return _random(torch.randn, _sizes(size), dtype, layout, requires_grad, device_mesh, placements)
