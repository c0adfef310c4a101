"""Differentiable collectives on plain local tensors, for code that does its own distribution.

Each has a gradient type. Think of the function on *global* values: ``all_gather`` is the identity from a sharded to a
whole tensor. Its result is the same on all ranks, and so, by default, is its gradient ("invariant"): right when every
rank goes on to compute the same. With ``varying=True`` each rank goes on with different work, the gradients are terms
of a sum, and the backward adds them up. The names are those of JAX's ``shard_map`` and of PyTorch's ``spmd_types``.

==================  ===========================  ==========================
collective          backward, invariant          backward, ``varying=True``
==================  ===========================  ==========================
``all_reduce``      identity                     all-reduce
``all_gather``      slice                        reduce-scatter
``reduce_scatter``  all-gather                   --
``all_to_all``      all-to-all                   --
==================  ===========================  ==========================
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hyper_parallel.comm.redistribute import transition
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import DeviceMesh
from hyper_parallel.sharding.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.sharding.spec import NOT_VARYING

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

Group = Any  # DeviceMesh of one axis, (DeviceMesh, axis name), or ProcessGroup


def all_reduce(tensor: torch.Tensor, group: Group, *, op: str = "sum", varying: bool = False) -> torch.Tensor:
    """Sum (or ``avg``, ``max``, ``min``, ``product``) of the ranks' tensors, on every rank.

    Ranks hold ``a0, a1``; each gets ``a0 + a1``. Backward: identity, or with ``varying`` an all-reduce.

    Args:
        tensor: this rank's term; same shape everywhere.
        group: a 1-D DeviceMesh, a pair (mesh, axis name), or a process group.
        op: reduction; only ``sum`` and ``avg`` carry gradients.
        varying: whether the ranks use the result for different work.
    """
    return _move(tensor, group, Partial(op), Replicate(), varying, tuple(tensor.shape))


def all_gather(
    tensor: torch.Tensor, group: Group, dim: int = 0, *, size: int | None = None, varying: bool = False
) -> torch.Tensor:
    """The ranks' tensors concatenated along ``dim``, on every rank.

    Ranks hold ``a0, a1``; each gets ``[a0, a1]``. Backward: slice, or with ``varying`` a reduce-scatter.

    Args:
        size: length of ``dim`` in the result when the ranks' pieces are uneven; they must then be cut as
            ``torch.chunk`` does. By default all ranks hold as much.
    """
    mesh = _mesh(group, tensor.device.type)
    dim %= tensor.ndim
    shape = list(tensor.shape)
    shape[dim] = shape[dim] * mesh.size() if size is None else size
    return _move(tensor, group, Shard(dim), Replicate(), varying, tuple(shape))


def reduce_scatter(tensor: torch.Tensor, group: Group, dim: int = 0, *, op: str = "sum") -> torch.Tensor:
    """This rank's part along ``dim`` of the sum of the ranks' tensors.

    Ranks hold ``a, b``; rank i gets part i of ``a + b``, cut as ``torch.chunk`` does. Backward: all-gather.
    """
    return _move(tensor, group, Partial(op), Shard(dim % tensor.ndim), False, tuple(tensor.shape))


def all_to_all(
    tensor: torch.Tensor, group: Group, split_dim: int, concat_dim: int, *, size: int | None = None
) -> torch.Tensor:
    """Shards along ``concat_dim`` become shards along ``split_dim``.

    Args:
        size: global length of ``concat_dim`` when the ranks' pieces are uneven, as in :func:`all_gather`.
    """
    mesh = _mesh(group, tensor.device.type)
    split_dim, concat_dim = split_dim % tensor.ndim, concat_dim % tensor.ndim
    shape = list(tensor.shape)
    shape[concat_dim] = shape[concat_dim] * mesh.size() if size is None else size
    return _move(tensor, group, Shard(concat_dim), Shard(split_dim), False, tuple(shape))


def _move(
    tensor: torch.Tensor, group: Group, have: Placement, want: Placement, varying: bool, shape: tuple[int, ...]
) -> torch.Tensor:
    mesh = _mesh(group, tensor.device.type)
    src = Layout.from_placements(mesh, [have], ndim=tensor.ndim)
    dst = Layout.from_placements(mesh, [want], ndim=tensor.ndim)
    return transition(tensor, (src, NOT_VARYING), (dst, frozenset([0]) if varying else NOT_VARYING), shape)


def _mesh(group: Group, device_type: str) -> DeviceMesh:
    """The 1-D mesh of a group."""
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        group = group[0][group[1]]
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"a collective runs over one mesh axis: give (mesh, axis), one of {group.mesh_dim_names}")
        return group
    if isinstance(group, dist.ProcessGroup):
        return _mesh_of_process_group(group, device_type)
    raise TypeError(
        f"group must be a 1-D DeviceMesh, (DeviceMesh, axis name) or a ProcessGroup, got {type(group).__name__}"
    )


# Lasts while the group does: the mesh holds it until the groups are destroyed.
_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()


def _mesh_of_process_group(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    meshes = _meshes.setdefault(group, {})
    if device_type not in meshes:
        meshes[device_type] = DeviceMesh.from_group(group, device_type)
    return meshes[device_type]
