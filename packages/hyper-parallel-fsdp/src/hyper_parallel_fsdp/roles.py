"""What each mesh axis is for, by its name.

======================================  ====================================================================
``fsdp``, ``fsdp_shard``, ``dp_shard``  parameters are sharded over it, gradients reduce-scattered
``shard``                               the same
``cp``                                  a data axis that shards too: its ranks hold other tokens of the same batch
``dp_replicate``, ``replicate``         parameters are copies, gradients all-reduced
``dp``                                  shards, unless the mesh has an axis of the first row: then it replicates
``ep``                                  a data axis for parameters that are Replicate on it, else left alone
``tp``                                  never a data axis
======================================  ====================================================================

A mesh without names, or none of whose names is in the table, is read as PyTorch's ``fully_shard`` reads it: one axis
shards; of two, the first replicates and the second shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.rules import MeshInfo

_SHARD = frozenset({"fsdp", "fsdp_shard", "dp_shard", "shard"})
_REPLICATE = frozenset({"dp_replicate", "replicate"})
_KNOWN = _SHARD | _REPLICATE | {"dp", "cp", "ep", "tp"}


@dataclass(frozen=True)
class MeshRoles:
    """The axes of a mesh, by index, in mesh order.

    Attributes:
        shard: parameters are sharded over these.
        replicate: parameters are copies on these, and the ranks have other data.
        expert: ``ep``.
        model: ``tp``; the ranks work on the same data.
    """

    shard: tuple[int, ...] = ()
    replicate: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    model: tuple[int, ...] = ()

    @property
    def data(self) -> tuple[int, ...]:
        """Axes along which the batch differs."""
        return tuple(sorted((*self.shard, *self.replicate, *self.expert)))


def mesh_roles(info: MeshInfo) -> MeshRoles:
    """The roles of a mesh's axes.

    Raises:
        ValueError: for an axis whose name says nothing beside others that do, or more than two nameless axes.
    """
    names = info.names
    known = [name in _KNOWN for name in names]
    if not any(known):
        if info.ndim > 2:
            raise ValueError(
                f"fully_shard: the axes {names} of a {info.ndim}-D mesh say nothing about their use; name them, "
                f"e.g. init_device_mesh(..., mesh_dim_names=('dp_replicate', 'fsdp', 'tp')). Known: {sorted(_KNOWN)}"
            )
        return MeshRoles(shard=(info.ndim - 1,), replicate=tuple(range(info.ndim - 1)))
    if not all(known):
        unknown = [name for name, is_known in zip(names, known, strict=True) if not is_known]
        raise ValueError(
            f"fully_shard: mesh axes {unknown} have no known use (known: {sorted(_KNOWN)}); rename them, or pass the "
            "part of the mesh that this module is spread over, e.g. mesh['fsdp', 'tp'] without a pipeline axis"
        )
    dp_shards = not _SHARD & set(names)
    shard, replicate = [], []
    for axis, name in enumerate(names):
        if name in _SHARD or name == "cp" or (name == "dp" and dp_shards):
            shard.append(axis)
        elif name in _REPLICATE or name == "dp":
            replicate.append(axis)
    return MeshRoles(tuple(shard), tuple(replicate), _named(names, "ep"), _named(names, "tp"))


def _named(names: tuple[str, ...], wanted: str) -> tuple[int, ...]:
    return tuple(axis for axis, name in enumerate(names) if name == wanted)
