"""Device meshes: PyTorch's ``DeviceMesh``, and what a layout needs to know about one.

``MeshInfo`` keeps, per mesh, this rank's coordinate and the process groups over one axis or several together. It is
made once per mesh and is the place where layouts of that mesh are interned.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel import _wiring
from hyper_parallel.sharding.group_lifetime import end_with_world, gone
from hyper_parallel.sharding.time_limit import give_users_limit, users_limit
from hyper_parallel.torch_compat import current_mesh, new_local_group
from hyper_parallel.torch_compat import root_of_mesh as root_mesh

__all__ = ["AxisGroup", "DeviceMesh", "MeshInfo", "init_device_mesh", "mesh_info", "root_mesh"]


class AxisGroup:
    """The ranks that differ from this one only along some mesh axes.

    Attributes:
        axes: these axes, by index in their mesh.
        mesh_axes: names of all axes of that mesh, so that the indices are never read as those of another.
        coordinates: mesh coordinate of each member, in the order of the group's ranks.
        rank: this process's index in the group.
    """

    __slots__ = ("_group", "axes", "coordinates", "mesh_axes", "rank", "size")

    def __init__(
        self,
        axes: tuple[int, ...],
        mesh_axes: tuple[str, ...],
        group: Any,
        coordinates: list[tuple[int, ...]],
        rank: int,
    ) -> None:
        self.axes, self.mesh_axes, self.coordinates, self.rank = axes, mesh_axes, coordinates, rank
        self.size = len(coordinates)
        self._group = weakref.ref(group)

    @property
    def group(self) -> Any:
        """The process group.

        Raises:
            RuntimeError: when it was destroyed.
        """
        group = self._group()
        if group is None:
            raise gone()
        return group


class MeshInfo:
    """One mesh as seen by this rank.

    Attributes:
        mesh: the first of the equal meshes that was seen. Another one may have been sliced from another root, so ask
            the mesh at hand for its root, not this one.
        layouts: the interned layouts of this mesh, each for as long as somebody holds it.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.shape: tuple[int, ...] = tuple(mesh.shape)
        self.ndim = len(self.shape)
        self.names: tuple[str, ...] = tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(self.ndim)))
        self.device_type: str = mesh.device_type
        coordinate = mesh.get_coordinate()
        self.coordinate: tuple[int, ...] | None = None if coordinate is None else tuple(coordinate)
        self._world = weakref.ref(dist.group.WORLD)
        self.layouts: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._groups: dict[tuple[int, ...], AxisGroup] = {}
        self._parts: dict[tuple[tuple[int, ...], int], AxisGroup] = {}

    def is_current(self) -> bool:
        """Whether the default process group is the one that this was made with; the groups of another are dead."""
        world = dist.group.WORLD
        return world is not None and self._world() is world

    def axis(self, name: str | int) -> int:
        """Index of a mesh axis given by name or index.

        Raises:
            ValueError: when the mesh has no such axis.
        """
        if isinstance(name, int):
            if -self.ndim <= name < self.ndim:
                return name % self.ndim
        elif name in self.names:
            return self.names.index(name)
        raise ValueError(f"mesh axis {name!r} is unknown; this mesh has {self.names} of sizes {self.shape}")

    def my_coordinate(self) -> tuple[int, ...]:
        """This rank's mesh coordinate.

        Raises:
            RuntimeError: when this rank is not part of the mesh.
        """
        if self.coordinate is None:
            raise RuntimeError(f"rank {dist.get_rank()} is not part of the mesh {self.names} of sizes {self.shape}")
        return self.coordinate

    def group(self, axes: tuple[int, ...]) -> AxisGroup:
        """The group over ``axes`` (ascending) that contains this rank; made on first use.

        Only the members take part in making a flattened group (local synchronisation), so one pipeline stage can use
        its mesh without the others.
        """
        found = self._groups.get(axes)
        if found is None:
            found = self._groups[axes] = self._make_group(axes)
        return found

    def _make_group(self, axes: tuple[int, ...]) -> AxisGroup:
        if not self.is_current():
            raise gone()
        here = self.my_coordinate()
        along = [range(self.shape[a]) if a in axes else (here[a],) for a in range(self.ndim)]
        cut = self.mesh.mesh[tuple(slice(None) if a in axes else here[a] for a in range(self.ndim))]
        members = dict(zip(cut.flatten().tolist(), itertools.product(*along), strict=True))
        group: Any
        if len(axes) == 1:
            group = self.mesh.get_group(axes[0])
        elif sorted(members) == list(range(dist.get_world_size())):
            group = dist.group.WORLD
        else:
            group = new_local_group(sorted(members), users_limit())
        ranks = dist.get_process_group_ranks(group)
        if sorted(ranks) != sorted(members):  # of another start of torch.distributed, found by the same name
            raise gone()
        return AxisGroup(axes, self.names, group, [members[r] for r in ranks], ranks.index(dist.get_rank()))

    def part_of_group(self, axes: tuple[int, ...], size: int) -> AxisGroup:
        """Of :meth:`group`, the ``size`` neighbouring ranks among which this rank is; made on first use, by them alone.

        ``size`` divides the group's.
        """
        found = self._parts.get((axes, size))
        if found is None:
            whole = self.group(axes)
            first = whole.rank // size * size
            members = {int(self.mesh.mesh[c]): c for c in whole.coordinates[first : first + size]}
            group: Any = new_local_group(sorted(members), users_limit())
            ranks = dist.get_process_group_ranks(group)
            found = AxisGroup(axes, self.names, group, [members[r] for r in ranks], ranks.index(dist.get_rank()))
            self._parts[axes, size] = found
        return found

    def axes_beyond(self, other: MeshInfo) -> tuple[int, ...] | None:
        """Axes of this mesh that ``other`` lacks, when ``other`` is a sub-mesh of it (same names, same ranks); else
        None."""
        if other is self:
            return ()
        if not set(other.names) <= set(self.names) or self.coordinate is None:
            return None
        extra = tuple(a for a, name in enumerate(self.names) if name not in other.names)
        here = self.mesh.mesh[tuple(self.coordinate[a] if a in extra else slice(None) for a in range(self.ndim))]
        kept = [name for name in self.names if name in other.names]
        here = here.permute([kept.index(name) for name in other.names])
        return extra if torch.equal(here, other.mesh.mesh) else None

    def default_device(self) -> torch.device:
        """The device on which this rank keeps its local tensors."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        module = torch.get_device_module(self.device_type)
        return torch.device(self.device_type, module.current_device())

    def __repr__(self) -> str:
        return "x".join(f"{n}={s}" for n, s in zip(self.names, self.shape, strict=True))


# Kept for the whole process: a program has a handful of them, and they hold no process groups.
_INFOS: dict[DeviceMesh, MeshInfo] = {}


def mesh_of_ranks(device_type: str, ranks: Any, names: tuple[str, ...] | None) -> DeviceMesh:
    """The mesh of these ranks (nested lists) that is in use, or else a new one, which all ranks must make together."""
    for mesh, info in reversed(_INFOS.items()):
        if info.is_current() and (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names) == (
            device_type,
            ranks,
            names,
        ):
            return mesh
    return DeviceMesh(device_type, ranks, mesh_dim_names=names)


def mesh_info(mesh: DeviceMesh) -> MeshInfo:
    """The :class:`MeshInfo` of a mesh; equal meshes share one.

    Raises:
        TypeError: when ``mesh`` is not a DeviceMesh.
        PluginError: when the ranks of the mesh have different plugins installed (checked once per mesh).
        RuntimeError: when the process groups of the mesh were destroyed.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh (see init_device_mesh), got {type(mesh).__name__}")
    info = _INFOS.get(mesh)
    # A new default group means that torch.distributed was started again: the old groups are dead.
    if info is None or not info.is_current():
        if not dist.is_initialized() or (info is not None and info.mesh is mesh):
            raise gone()
        _INFOS.pop(mesh, None)  # with its key, an equal mesh of the old groups
        end_with_world(mesh)
        give_users_limit(mesh)
        info = MeshInfo(mesh)
        _wiring.mesh_first_used(info)
        _INFOS[mesh] = info
    elif mesh is not info.mesh:
        end_with_world(mesh)
        give_users_limit(mesh)
    return info


def mesh_or_current(mesh: Any, caller: str) -> Any:
    """What was given as mesh, or the mesh of the ``with mesh:`` block around.

    Raises:
        ValueError: nothing was given outside of such a block.
    """
    if mesh is not None:
        return mesh
    try:
        return current_mesh()
    except RuntimeError as error:
        raise ValueError(
            f"{caller}: device_mesh is missing, and there is no `with mesh:` block around; pass a DeviceMesh (see "
            "init_device_mesh) or a Layout"
        ) from error
