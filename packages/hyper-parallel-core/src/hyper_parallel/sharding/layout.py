"""Layout: how a tensor lies on a device mesh.

A layout is an immutable value: mesh, tensor rank, one placement per mesh axis, and the order in which several axes
shard one tensor dimension. Equal layouts of one mesh are the same object, so comparing is ``is``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.sharding.mesh import DeviceMesh, MeshInfo, init_device_mesh, mesh_info, mesh_of_ranks
from hyper_parallel.sharding.placements import (
    PackedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    is_partial,
    is_replicate,
    is_shard,
    on_dim,
    short,
)

__all__ = ["Layout", "as_layout"]

ShardOrder = tuple[tuple[int, ...], ...]


class _MeshDescription:
    """A mesh by shape and axis names, whose DeviceMesh is made on first need."""

    def __init__(
        self, shape: Sequence[int], names: Sequence[str], ranks: Sequence[int] | None, device_type: str | None
    ):
        self.shape, self.names = tuple(int(s) for s in shape), tuple(names)
        if len(self.shape) != len(self.names) or len(set(self.names)) != len(self.names):
            raise ValueError(
                f"a mesh of shape {self.shape} needs {len(self.shape)} different axis names, got {self.names}"
            )
        if "None" in self.names:
            raise ValueError('"None" marks a dimension that no axis shards; it cannot be the name of a mesh axis')
        self.ndim = len(self.shape)
        self.ranks = None if ranks is None else tuple(ranks)
        self.device_type = device_type
        self._info: MeshInfo | None = None

    def info(self) -> MeshInfo:
        if self._info is None or not self._info.is_current():
            if not dist.is_initialized():
                raise RuntimeError("this layout's mesh needs torch.distributed: call init_process_group first")
            self._info = mesh_info(self._make())
        return self._info

    def _make(self) -> DeviceMesh:
        device_type = self.device_type or device_type_of_backend()
        world = dist.get_world_size() if self.ranks is None else len(self.ranks)
        if math.prod(self.shape) != world:
            raise ValueError(f"a mesh of shape {self.shape} needs {math.prod(self.shape)} ranks, there are {world}")
        if self.ranks is None:
            return init_device_mesh(device_type, self.shape, mesh_dim_names=self.names)
        return DeviceMesh(device_type, torch.tensor(self.ranks).view(self.shape), mesh_dim_names=self.names)


def device_type_of_backend() -> str:
    """The kind of device that the default process group's backend is for."""
    return {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}.get(dist.get_backend(), "cpu")


class Layout:
    """How a tensor lies on a device mesh.

    To code that is written for any tensor it is ``torch.strided``, which every DTensor is: ``x.layout ==
    torch.strided`` holds, and ``torch.empty_like(x, layout=x.layout)`` takes it. Its hash is its own.

    Three ways to make one::

        Layout.from_placements(mesh, [Shard(0), Replicate()], ndim=2)   # a placement per mesh axis
        layout = Layout((2, 4), ("dp", "tp"))                           # describes a mesh only
        layout("dp", "None")                                            # per tensor dim: the axes that shard it
        layout(("dp", "tp"), "None", partial={"pp": "sum"})             # several axes, outermost first

    Attributes:
        placements: one placement per mesh axis.
        shard_order: per tensor dimension, the mesh axes that shard it, outermost first.
        ndim: rank of the tensor.

    Raises:
        ValueError: for an unknown axis, a dimension out of range, an axis used twice.
    """

    __slots__ = ("__weakref__", "_dual", "_hash", "_partial", "_source", "_specs", "ndim", "placements", "shard_order")

    _source: MeshInfo | _MeshDescription
    placements: tuple[Placement, ...]
    shard_order: ShardOrder
    ndim: int

    def __init__(
        self,
        mesh_shape: Sequence[int],
        alias_name: Sequence[str],
        rank_list: Sequence[int] | None = None,
        *,
        device_type: str | None = None,
    ) -> None:
        self._source = _MeshDescription(mesh_shape, alias_name, rank_list, device_type)
        self.placements, self.shard_order, self.ndim = (), (), -1
        self._specs: Any = None
        self._dual: Any = None
        self._hash, self._partial = hash((self.mesh_shape, (), ())), False

    @classmethod
    def _intern(
        cls, source: MeshInfo | _MeshDescription, placements: tuple[Placement, ...], order: ShardOrder
    ) -> Layout:
        table = source.layouts if isinstance(source, MeshInfo) else None
        key = (placements, order)
        found = None if table is None else table.get(key)
        if found is None:
            found = object.__new__(cls)
            found._source, found.placements, found.shard_order = source, placements, order
            found.ndim, found._specs, found._dual = len(order), {}, {}
            found._hash = hash((source.shape, placements, order))
            found._partial = any(is_partial(p) for p in placements)
            if table is not None:
                table[key] = found
        return found

    @classmethod
    def from_placements(
        cls,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        ndim: int,
        shard_order: Mapping[int, Sequence[int | str]] | Sequence[Sequence[int | str]] | None = None,
    ) -> Layout:
        """The layout with one placement per axis of ``mesh``.

        Args:
            mesh: the device mesh.
            placements: one per mesh axis; negative dims count from the end.
            ndim: rank of the tensor.
            shard_order: per tensor dim, the axes (index or name) that shard it, outermost first. Default: mesh order.
        """
        info = mesh_info(mesh)
        fixed = _normalise(info, placements, ndim)
        return cls._intern(info, fixed, _order(info, fixed, ndim, shard_order))

    def __call__(self, *aliases: Any, partial: Mapping[str, str] | None = None) -> Layout:
        """A tensor's layout on this mesh: per tensor dimension the name of the axis that shards it, a tuple of names
        (outermost first), or ``"None"``."""
        names = self.mesh_dim_names
        placements: list[Placement] = [Replicate()] * len(names)
        order: list[tuple[int, ...]] = []
        for dim, alias in enumerate(aliases):
            axes = () if alias in (None, "None", ()) else (alias,) if isinstance(alias, str) else tuple(alias)
            for name in axes:
                if name not in names:
                    raise ValueError(f"mesh axis {name!r} is unknown; this layout's axes are {names}")
                if placements[names.index(name)] != Replicate():
                    raise ValueError(f"mesh axis {name!r} is used twice in {aliases}; one axis shards one dimension")
                placements[names.index(name)] = Shard(dim)
            order.append(tuple(names.index(n) for n in axes))
        for name, op in (partial or {}).items():
            if name not in names:
                raise ValueError(f"partial: mesh axis {name!r} is unknown; this layout's axes are {names}")
            if placements[names.index(name)] != Replicate():
                raise ValueError(f"partial: mesh axis {name!r} already shards a dimension")
            placements[names.index(name)] = Partial(op)
        return Layout._intern(self._source, tuple(placements), tuple(order))

    # -- mesh -----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> MeshInfo:
        """This rank's view of the mesh; makes the DeviceMesh of an alias layout on first need."""
        source = self._source
        return source if isinstance(source, MeshInfo) else source.info()

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh."""
        return self.info.mesh

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self._source.shape

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return self._source.names

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the mesh in the order of their coordinates; an alias layout needs no process group for it."""
        source = self._source
        if isinstance(source, MeshInfo):
            return tuple(source.mesh.mesh.flatten().tolist())
        return tuple(range(math.prod(source.shape))) if source.ranks is None else source.ranks

    def bind(self) -> Layout:
        """The interned layout on the real mesh (itself unless this is an alias layout)."""
        if isinstance(self._source, MeshInfo):
            return self
        if self.ndim < 0:
            raise ValueError(
                'this Layout only describes a mesh; call it with one alias per tensor dim: layout("dp", "None")'
            )
        return Layout._intern(self._source.info(), self.placements, self.shard_order)

    # -- variants -------------------------------------------------------------------------------------------------

    def replace(self, axis: str | int, placement: Placement) -> Layout:
        """The same layout with another placement on one mesh axis; a new shard is innermost on its dimension."""
        index = self.info.axis(axis)
        return self.with_placements({index: placement})

    def with_placements(self, changes: Mapping[int, Placement]) -> Layout:
        """The same layout with other placements on some axes; each new shard becomes innermost on its dimension."""
        placements = list(self.placements)
        order = [list(axes) for axes in self.shard_order]
        for axis, placement in changes.items():
            old = placements[axis]
            if placement == old:
                continue
            if is_shard(old):
                order[old.dim].remove(axis)
            if is_shard(placement):
                order[placement.dim].append(axis)
            placements[axis] = placement
        return self.with_order(tuple(placements), tuple(tuple(axes) for axes in order))

    def with_order(self, placements: tuple[Placement, ...], order: ShardOrder) -> Layout:
        """A layout on the same mesh from normalised parts."""
        return Layout._intern(self._source, placements, order)

    def move_dims(self, mapping: Sequence[int | None], ndim: int) -> Layout:
        """The layout after dims are renamed: old dim ``d`` becomes ``mapping[d]`` of a tensor of rank ``ndim``.

        Raises:
            ValueError: when a dropped dimension is sharded.
        """
        placements = list(self.placements)
        order: list[tuple[int, ...]] = [()] * ndim
        for dim, axes in enumerate(self.shard_order):
            new = mapping[dim]
            if axes and new is None:
                raise ValueError(f"dimension {dim} is sharded over mesh axes {axes} and cannot be dropped")
            for axis in axes:
                placements[axis] = on_dim(placements[axis], new)  # type: ignore[arg-type]
            if new is not None and axes:
                order[new] = axes
        return self.with_order(tuple(placements), tuple(order))

    def replicated(self, ndim: int | None = None) -> Layout:
        """The all-Replicate layout on this mesh."""
        return self.with_order((Replicate(),) * len(self.placements), ((),) * (self.ndim if ndim is None else ndim))

    # -- questions ------------------------------------------------------------------------------------------------

    def is_partial(self) -> bool:
        """Whether some axis holds a pending reduction."""
        return self._partial

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(is_replicate(p) for p in self.placements)

    @property
    def alias_tensor_map(self) -> tuple[Any, ...]:
        """Per tensor dim the axis name, a tuple of names, or ``"None"``: what ``layout(...)`` takes."""
        names = self.mesh_dim_names
        return tuple(
            "None" if not axes else names[axes[0]] if len(axes) == 1 else tuple(names[a] for a in axes)
            for axes in self.shard_order
        )

    @property
    def tensor_map(self) -> tuple[Any, ...]:
        """Per tensor dim the mesh axis counted from the right, a tuple of them, or -1."""
        last = len(self.mesh_shape) - 1
        return tuple(
            -1 if not axes else last - axes[0] if len(axes) == 1 else tuple(last - a for a in axes)
            for axes in self.shard_order
        )

    def __eq__(self, other: object) -> bool:
        if self is other or other is torch.strided:
            return True
        if not isinstance(other, Layout) or (self.placements, self.shard_order) != (
            other.placements,
            other.shard_order,
        ):
            return False
        mine, theirs = self._source, other._source
        if isinstance(mine, MeshInfo) and isinstance(theirs, MeshInfo):
            return False  # interned: equal ones are the same object
        # Compared by description: making a mesh communicates, and == may be called on one rank only.
        return (mine.shape, mine.names, self.ranks) == (theirs.shape, theirs.names, other.ranks)

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A torch function that takes a ``torch.layout`` was given this."""
        strided = [torch.strided if isinstance(a, Layout) else a for a in args]
        return func(*strided, **{k: torch.strided if isinstance(v, Layout) else v for k, v in (kwargs or {}).items()})

    def __repr__(self) -> str:
        mesh = "x".join(f"{n}={s}" for n, s in zip(self.mesh_dim_names, self.mesh_shape, strict=True))
        if self.ndim < 0:
            return f"Layout({mesh})"
        parts = [f"{n}: {short(p)}" for n, p in zip(self.mesh_dim_names, self.placements, strict=True)]
        for dim, axes in enumerate(self.shard_order):
            if list(axes) != sorted(axes):
                parts.append(f"dim {dim} by ({', '.join(self.mesh_dim_names[a] for a in axes)})")
        return f"Layout({mesh} | {', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self.ndim < 0:
            source = self._source
            assert isinstance(source, _MeshDescription)
            return (Layout, (source.shape, source.names, source.ranks))
        # Not the DeviceMesh itself: it finds its process groups by names, which in another run mean other groups.
        mesh = self.mesh
        where = (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names)
        return (_rebuild_layout, (*where, self.placements, self.ndim, self.shard_order))


def _rebuild_layout(
    device_type: str,
    ranks: Any,
    names: tuple[str, ...] | None,
    placements: tuple[Placement, ...],
    ndim: int,
    order: ShardOrder,
) -> Layout:
    return Layout.from_placements(mesh_of_ranks(device_type, ranks, names), placements, ndim=ndim, shard_order=order)


def _normalise(info: MeshInfo, placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    if isinstance(placements, Placement):
        placements = (placements,)
    if len(placements) != info.ndim:
        slice_it = f", or slice the mesh, such as mesh[{info.names[-1]!r}]" if len(placements) == 1 else ""
        raise ValueError(
            f"{len(placements)} placements {tuple(placements)} for a mesh of {info.ndim} axes {info.names}: give one "
            f"per axis{slice_it}"
        )
    fixed = []
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Placement) or type(placement) not in (Shard, Replicate, Partial, PackedShard):
            raise ValueError(
                f"placement {placement!r} on mesh axis {info.names[axis]!r} is not supported: "
                "use Shard, Replicate, Partial or PackedShard"
            )
        if is_shard(placement):
            if not -ndim <= placement.dim < ndim:
                raise ValueError(
                    f"{placement!r} on mesh axis {info.names[axis]!r} is out of range for a tensor of {ndim} dimensions"
                )
            if placement.dim < 0:
                placement = on_dim(placement, placement.dim + ndim)
        fixed.append(placement)
    return tuple(fixed)


def _order(info: MeshInfo, placements: tuple[Placement, ...], ndim: int, given: Any) -> ShardOrder:
    default: list[list[int]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(placements):
        if is_shard(placement):
            # A PackedShard is outermost by definition.
            default[placement.dim].insert(
                0 if isinstance(placement, PackedShard) else len(default[placement.dim]), axis
            )
    order = [tuple(axes) for axes in default]
    if given is not None:
        items = given.items() if isinstance(given, Mapping) else enumerate(given)
        for dim, axes in items:
            wanted = tuple(info.axis(a) for a in axes)
            if sorted(wanted) != sorted(order[dim]):
                raise ValueError(
                    f"shard_order of dim {dim} names axes {tuple(axes)}, but its placements shard it over "
                    f"{tuple(info.names[a] for a in order[dim])}"
                )
            order[dim] = wanted
    for dim, wanted in enumerate(order):
        if any(isinstance(placements[a], PackedShard) for a in wanted[1:]):
            raise ValueError(
                f"PackedShard must be the outermost shard of dim {dim}; other axes may only shard its pieces"
            )
    return tuple(order)


def as_layout(mesh: Any, placements: Sequence[Placement] | Layout | None, ndim: int) -> Layout:
    """The layout meant by ``(mesh, placements)`` or by a :class:`Layout` in the place of the mesh or the placements."""
    for given in (mesh, placements):
        if isinstance(given, Layout):
            layout = given.bind()
            if layout.ndim != ndim:
                raise ValueError(f"{layout} is for a tensor of {layout.ndim} dimensions, this one has {ndim}")
            return layout
    if placements is None:
        raise ValueError("placements are missing: give one per mesh axis, or a Layout")
    assert not isinstance(placements, Layout)
    return Layout.from_placements(mesh, placements, ndim=ndim)


def as_layout_or_whole(mesh: Any, placements: Sequence[Placement] | Layout | None, ndim: int) -> Layout:
    """As :func:`as_layout`; without placements a mesh means Replicate on each of its axes, as for PyTorch."""
    if placements is None and isinstance(mesh, DeviceMesh):
        placements = [Replicate()] * mesh.ndim
    return as_layout(mesh, placements, ndim)


def fit_rank(layout: Layout, ndim: int) -> Layout:
    """A layout for a tensor of ``ndim`` dims; the engine knows an output's rank only from its shards."""
    if layout.ndim == ndim:
        return layout
    order = layout.shard_order
    if any(order[ndim:]):
        raise ValueError(f"a rule shards dim {len(order) - 1} of its result, which has {ndim} dimensions: {layout}")
    return layout.with_order(layout.placements, (order + ((),) * (ndim - len(order)))[:ndim])
