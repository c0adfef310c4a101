"""Placements: how one mesh axis holds a tensor.

``Shard``, ``Replicate`` and ``Partial`` are PyTorch's own classes, re-exported, so that layouts move freely between
the two libraries. ``PackedShard`` is ours: PyTorch has no placement for a fused weight.
"""

from __future__ import annotations

from typing import TypeGuard

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

__all__ = ["PackedShard", "Partial", "Placement", "Replicate", "Shard"]


class PackedShard(Shard):
    """Each section of ``dim`` is sharded on its own.

    A fused QKV weight of shape ``[q + k + v, hidden]`` with ``PackedShard(0, (q, k, v))`` gives every rank its part of
    q, of k and of v, concatenated: the model's own ``split`` then works on the local piece without communication.

    Args:
        dim: tensor dimension that is sharded.
        sections: length of each section, in elements; they sum to the global length of ``dim``.

    Raises:
        ValueError: when a section is negative or there is none.
    """

    sections: tuple[int, ...]

    def __init__(self, dim: int, sections: tuple[int, ...] | list[int]) -> None:
        super().__init__(dim)
        if not isinstance(sections, (tuple, list)):
            raise ValueError(f"PackedShard takes the length of every section, such as (4, 4, 4), got {sections!r}")
        self.sections = tuple(int(s) for s in sections)
        if not self.sections or min(self.sections) < 0:
            raise ValueError(f"PackedShard needs one or more non-negative sections, got {sections!r}")

    def __eq__(self, other: object) -> bool:
        return type(other) is PackedShard and self.dim == other.dim and self.sections == other.sections

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((PackedShard, self.dim, self.sections))

    def __repr__(self) -> str:
        return f"PackedShard(dim={self.dim}, sections={self.sections})"

    def __str__(self) -> str:
        return f"PS({self.dim}, {self.sections})"

    def __reduce__(self) -> tuple[type, tuple[int, tuple[int, ...]]]:
        return (PackedShard, (self.dim, self.sections))


def is_shard(placement: object) -> TypeGuard[Shard]:
    """Whether the axis holds slices (plain or packed). As fast as a class test: torch's placements have a slow
    isinstance."""
    kind = placement.__class__
    return kind is Shard or kind is PackedShard


def is_replicate(placement: object) -> TypeGuard[Replicate]:
    """Whether the axis holds copies."""
    return placement.__class__ is Replicate


def is_partial(placement: object) -> TypeGuard[Partial]:
    """Whether the axis holds terms of a pending reduction."""
    return placement.__class__ is Partial


def on_dim(placement: Placement, dim: int) -> Placement:
    """The same kind of shard on another tensor dimension."""
    return PackedShard(dim, placement.sections) if type(placement) is PackedShard else Shard(dim)


def short(placement: Placement) -> str:
    """One placement as people write it in tables: ``S(0)``, ``R``, ``P(sum)``."""
    if isinstance(placement, PackedShard):
        return str(placement)
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return "R"
