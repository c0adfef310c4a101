"""Putting a global tensor on a mesh without communication: every rank computes its own piece from the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hyper_parallel.comm.reduce_ops import norm_order
from hyper_parallel.sharding.layout import Layout, as_layout
from hyper_parallel.sharding.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.sharding.placements import Partial, Placement
from hyper_parallel.sharding.shard_ranges import box
from hyper_parallel.sharding.spec import contiguous_stride, inverse, make_spec
from hyper_parallel.tensor.dtensor import DTensor, wrap

__all__ = ["make", "mesh_names", "mesh_of", "piece_of"]


def mesh_names(shape: Sequence[int]) -> tuple[str, ...]:
    """Axis names of the kit's meshes."""
    return ("pp", "dp", "tp")[-len(shape) :]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of this shape over all ranks, named as in ``mesh_names``; made once per rank, as groups are costly."""
    meshes = _meshes.setdefault(dist.group.WORLD, {})  # ranks that are threads have a world each
    if shape not in meshes:
        meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=mesh_names(shape))
    return meshes[shape]


_meshes: WeakKeyDictionary[Any, dict[tuple[int, ...], DeviceMesh]] = WeakKeyDictionary()


def make(
    value: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | Layout,
    *,
    shard_order: Mapping[int, Sequence[int | str]] | Sequence[Sequence[int | str]] | None = None,
    varying: Iterable[int] = (),
    requires_grad: bool = False,
    seed: int = 0,
) -> DTensor:
    """A leaf DTensor with the global value ``value``, which every rank has; no communication.

    Args:
        value: the global tensor, equal on all ranks. The DTensor has its dim order in memory.
        placements: one per mesh axis, or a Layout. A pending reduction gets random terms that reduce to the value,
            to whole numbers exactly.
        shard_order: as in :meth:`Layout.from_placements`.
        varying: mesh axes on which the tensor is Replicate and its gradient Partial.
        requires_grad: whether to ask for a gradient.
        seed: of the random terms; the same on all ranks.

    Raises:
        ValueError: for two different reduce ops at once, whose order would matter.
    """
    if isinstance(placements, Layout):
        layout = as_layout(placements, None, value.ndim)
    else:
        layout = Layout.from_placements(mesh, placements, ndim=value.ndim, shard_order=shard_order)
    value = value.detach()
    order = _dim_order(value)
    piece = piece_of(_term(value, layout, seed), layout)
    local = piece.permute(order).contiguous().permute(inverse(order))
    local.requires_grad_(requires_grad)
    step = contiguous_stride([value.shape[d] for d in order])
    stride = tuple(step[place] for place in inverse(order))
    return wrap(local, make_spec(layout, value.shape, stride, value.dtype, frozenset(varying)))


def piece_of(value: torch.Tensor, layout: Layout, coordinate: tuple[int, ...] | None = None) -> torch.Tensor:
    """The part of a global tensor that the rank at mesh ``coordinate`` (default: this one) holds, as a copy."""
    coordinate = layout.info.my_coordinate() if coordinate is None else coordinate
    piece = value
    for dim, intervals in enumerate(box(layout, tuple(value.shape), coordinate)):
        if layout.shard_order[dim]:
            kept = [torch.arange(start, stop) for start, stop in intervals]
            piece = piece.index_select(dim, torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64))
    return piece.clone()


def _term(value: torch.Tensor, layout: Layout, seed: int) -> torch.Tensor:
    """This rank's term of the pending reductions of a layout; the value itself when there are none."""
    ops = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
    if not ops:
        return value
    if len(ops) > 1:
        raise ValueError(f"cannot make terms for several reduce ops at once: {sorted(ops)}")
    axes = [a for a, p in enumerate(layout.placements) if isinstance(p, Partial)]
    count = math.prod(layout.mesh_shape[a] for a in axes)
    index = 0
    for axis in axes:
        index = index * layout.mesh_shape[axis] + layout.info.my_coordinate()[axis]
    return _terms(value, ops.pop(), count, torch.Generator().manual_seed(1000 + seed))[index]


def _terms(value: torch.Tensor, op: str, count: int, generator: torch.Generator) -> Any:
    shape = (count, *value.shape)
    if value.is_floating_point() or value.is_complex():
        noise = _sixteenths(torch.randn(shape, generator=generator, dtype=value.dtype))
    else:
        noise = torch.randint(-3, 4, shape, generator=generator).to(value.dtype)
    if op in ("sum", "avg"):
        noise[0] = value * (count if op == "avg" else 1) - noise[1:].sum(0)
        return noise
    if op == "product":
        return [value, *[torch.ones_like(value)] * (count - 1)]
    if (p := norm_order(op)) is not None:
        return value.expand(shape) * count ** (-1 / p)
    # The largest (smallest) term sits on another rank for every element.
    owner = torch.randint(0, count, tuple(value.shape), generator=generator)
    away = noise.abs() if op == "min" else -noise.abs()
    return [torch.where(owner == i, value, value + away[i]) for i in range(count)]


def _sixteenths(noise: torch.Tensor) -> torch.Tensor:
    """The same, rounded: terms of whole numbers then sum to them exactly, in whatever order, and equals stay equal."""
    parts = torch.view_as_real(noise) if noise.is_complex() else noise
    parts.mul_(16).round_().div_(16)
    return noise


def _dim_order(value: torch.Tensor) -> list[int]:
    """Dims from the outermost to the innermost in memory."""
    if value.is_contiguous():
        return list(range(value.ndim))
    return sorted(range(value.ndim), key=lambda d: (-value.stride()[d], d))
