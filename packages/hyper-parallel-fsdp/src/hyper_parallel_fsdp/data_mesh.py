"""The mesh of one ``fully_shard`` call, and how a parameter of the module lies on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyper_parallel import DeviceMesh, DTensor, Layout, Partial, Placement, Replicate, Shard, init_device_mesh
from hyper_parallel.rules import MeshInfo, is_replicate, mesh_info, root_mesh
from hyper_parallel_fsdp.group_info import DataGroups, GroupInfo
from hyper_parallel_fsdp.roles import MeshRoles, mesh_roles


@dataclass(frozen=True)
class DataMesh:
    """A mesh with the roles of its axes.

    Attributes:
        info: the mesh.
        roles: of its axes; without ``shard`` axes where parameters are not sharded.
        root: the mesh that it was sliced from, or itself.
    """

    info: MeshInfo
    roles: MeshRoles
    root: DeviceMesh

    @property
    def data_size(self) -> int:
        """Number of different batches: what gradients are divided by when they are averaged."""
        size = 1
        for axis in self.roles.data:
            size *= self.info.shape[axis]
        return size

    def axis_names(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        """The names of some axes."""
        return tuple(self.info.names[a] for a in axes)


def data_mesh(mesh: DeviceMesh | None, enable_param_shard: bool | None) -> DataMesh:
    """The mesh and roles that the arguments of ``fully_shard`` mean.

    Raises:
        RuntimeError: no mesh, and torch.distributed is not initialised.
        ValueError: sharding is asked for on a mesh without an axis to shard over.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise RuntimeError("fully_shard: call torch.distributed.init_process_group() first, or pass mesh=")
        device_type = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        mesh = init_device_mesh(
            device_type.type if device_type else "cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)
        )
    info = mesh_info(mesh)
    roles = mesh_roles(info)
    if not roles.data and not enable_param_shard:
        # Only tensor parallelism: the data axes are those of the mesh that this one was sliced from.
        larger = mesh_info(root_mesh(mesh))
        if larger is not info:
            info, roles = larger, mesh_roles(larger)
            enable_param_shard = False
    if enable_param_shard is None:
        enable_param_shard = bool(roles.shard)
    if enable_param_shard and not roles.shard:
        raise ValueError(
            f"fully_shard: enable_param_shard=True, but none of the mesh axes {info.names} is a data axis to shard "
            "over; pass a mesh with an axis 'fsdp' or 'dp_shard' (e.g. the whole mesh instead of mesh['tp']), or leave "
            "enable_param_shard out"
        )
    if not enable_param_shard:
        roles = MeshRoles((), tuple(sorted((*roles.shard, *roles.replicate))), roles.expert, roles.model)
    return DataMesh(info, roles, root_mesh(mesh))


@dataclass(frozen=True)
class ParamPlacement:
    """How one parameter lies on the ranks.

    Attributes:
        sharded: its layout outside forward and backward: model axes (TP, EP) and data axes at once.
        whole: the same with the sharding axes Replicate; what computation sees when the batch is laid out over data
            axes.
        local: the layout on the mesh without data axes, which computation sees when the batch is this rank's own;
            None for a plain tensor.
        varying: data axes by index, over which the gradients of ``whole`` are terms of a sum.
        groups: over which ranks it is sharded and reduced.
        dim: tensor dimension that the sharding axes shard.
        shard_axes: these axes, by index, outermost first.
    """

    sharded: Layout
    whole: Layout
    local: Layout | None
    varying: frozenset[int]
    groups: DataGroups
    dim: int
    shard_axes: tuple[int, ...]


def place(
    name: str,
    parameter: torch.Tensor,
    data: DataMesh,
    wanted: Shard | Replicate | None,
) -> ParamPlacement:
    """Decide how a parameter lies.

    Args:
        name: for messages.
        parameter: plain, or a DTensor on a mesh without data axes or Replicate on them.
        data: the mesh of the ``fully_shard`` call.
        wanted: the shard over the data axes; Replicate for none. Default: dim 0. A 0-dim parameter is never sharded.

    Raises:
        ValueError: the parameter's mesh does not belong to the data mesh, it is sharded over a data axis already or
            pending, or there is no such dimension.
    """
    layout = parameter.layout if isinstance(parameter, DTensor) else None
    info = data.info if layout is None else _common_mesh(name, data, layout.info)
    roles = data.roles

    def axes(of: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(info.axis(n) for n in data.axis_names(of))

    ndim = parameter.ndim
    whole = Layout.from_placements(info.mesh, [Replicate()] * info.ndim, ndim=ndim)
    if layout is not None:
        whole = _extended(layout, info)
    _check(name, whole, axes((*roles.shard, *roles.replicate)))
    replicated = [
        *axes(roles.replicate),
        *(a for a in axes(roles.expert) if is_replicate(whole.placements[a])),
    ]
    dim = _shard_dim(name, ndim, wanted)
    if dim is None:
        shard_axes: tuple[int, ...] = ()
        replicated += axes(roles.shard)
    else:
        shard_axes = axes(roles.shard)
    sharded = whole.with_placements({a: Shard(dim) for a in shard_axes}) if dim is not None else whole
    over_data = frozenset((*shard_axes, *replicated))
    groups = DataGroups(
        GroupInfo.over(info, shard_axes), GroupInfo.over(info, tuple(a for a in replicated if info.shape[a] > 1))
    )
    local = None if layout is None else _without(layout, {info.names[a] for a in over_data})
    return ParamPlacement(sharded, whole, local, over_data, groups, dim or 0, shard_axes)


def _shard_dim(name: str, ndim: int, wanted: Shard | Replicate | None) -> int | None:
    if ndim == 0 or isinstance(wanted, Replicate):
        return None
    if wanted is None:
        return 0
    if type(wanted) is not Shard:
        raise ValueError(
            f"fully_shard: shard_placement_fn returned {wanted!r} for parameter {name!r}; return Shard(dim), "
            "Replicate() to keep it whole, or None for Shard(0)"
        )
    if not -ndim <= wanted.dim < ndim:
        raise ValueError(f"fully_shard: {wanted!r} is out of range for parameter {name!r} of {ndim} dimensions")
    return wanted.dim % ndim


def _check(name: str, whole: Layout, data_axes: tuple[int, ...]) -> None:
    for axis, placement in enumerate(whole.placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"fully_shard: parameter {name!r} is a pending reduction ({whole}); call reduce_partial() on it first"
            )
        if axis in data_axes and not is_replicate(placement):
            raise ValueError(
                f"fully_shard: parameter {name!r} has {placement!r} on data axis {whole.mesh_dim_names[axis]!r} "
                "already; distribute it over the model axes only (tp, ep), and fully_shard shards it over the data axes"
            )


def _common_mesh(name: str, data: DataMesh, own: MeshInfo) -> MeshInfo:
    """The mesh that holds the data axes and the parameter's own axes."""
    if data.info.axes_beyond(own) is not None:
        return data.info
    if own.axes_beyond(data.info) is not None:
        return own
    # Equal meshes share one MeshInfo, so its mesh may have been sliced from another root than the one meant here.
    for root in (data.root, root_mesh(own.mesh)):
        info = mesh_info(root)
        if info.axes_beyond(data.info) is not None and info.axes_beyond(own) is not None:
            wanted = tuple(n for n in info.names if n in (*data.info.names, *own.names))
            return mesh_info(root[wanted])
    raise ValueError(
        f"fully_shard: parameter {name!r} is on mesh {own!r}, which shares no larger mesh with the data mesh "
        f"{data.info!r}; slice both from one mesh: mesh = init_device_mesh(..., mesh_dim_names=('fsdp', 'tp')), then "
        "mesh['fsdp'] and mesh['tp']"
    )


def _extended(layout: Layout, info: MeshInfo) -> Layout:
    """The layout on a larger mesh, Replicate on the axes that it has more."""
    return _on_axes(layout, info, {name: layout.placements[a] for a, name in enumerate(layout.mesh_dim_names)})


def _without(layout: Layout, names: set[str]) -> Layout | None:
    """The layout on its mesh without some axes; None when none is left."""
    kept = tuple(n for n in layout.mesh_dim_names if n not in names)
    if len(kept) == len(layout.mesh_dim_names):
        return layout
    if not kept:
        return None
    placements = {n: layout.placements[layout.info.axis(n)] for n in kept}
    return _on_axes(layout, mesh_info(root_mesh(layout.mesh)[kept]), placements)


def _on_axes(layout: Layout, info: MeshInfo, placements: Mapping[str, Placement]) -> Layout:
    order = [[layout.mesh_dim_names[a] for a in axes] for axes in layout.shard_order]
    return Layout.from_placements(
        info.mesh,
        [placements.get(n, Replicate()) for n in info.names],
        ndim=layout.ndim,
        shard_order=order,
    )
