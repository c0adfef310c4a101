"""Over which ranks a parameter's gradient is reduced, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist

from hyper_parallel.rules import AxisGroup, MeshInfo


@dataclass(frozen=True, eq=False)
class GroupInfo:
    """One group of ranks.

    Attributes:
        axes: names of the mesh axes that it spans.
        ranks: the global ranks in it, in group order.
        group: the group with its process group; None for this rank alone, with which nobody has to be spoken.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    group: AxisGroup | None

    @property
    def rank_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @classmethod
    def over(cls, info: MeshInfo, axes: tuple[int, ...]) -> GroupInfo:
        """The group over some axes of a mesh."""
        axes = tuple(sorted(axis for axis in axes if info.shape[axis] > 1))
        if not axes:
            return cls((), (dist.get_rank(),), None)
        group = info.group(axes)
        ranks = tuple(int(info.mesh.mesh[coordinate]) for coordinate in group.coordinates)
        return cls(tuple(info.names[a] for a in axes), ranks, group)


@dataclass(frozen=True, eq=False)
class DataGroups:
    """The groups of a parameter, and from them what happens to its gradient.

    ================  ===========  ==================================================
    ``shard_size``    ``dp_size``  reduction
    ================  ===========  ==================================================
    > 1               > 1          reduce-scatter, then all-reduce of the shard
    > 1               1            reduce-scatter
    1                 > 1          all-reduce
    1                 1            nothing
    ================  ===========  ==================================================

    Attributes:
        sharded_group_info: the ranks among which the parameter is sharded (reduce-scatter, all-gather).
        unsharded_group_info: the ranks that hold the same shard for other data (all-reduce).
        rank_size: number of ranks whose gradients are reduced.
        shard_size: number of shards.
    """

    sharded_group_info: GroupInfo
    unsharded_group_info: GroupInfo

    @property
    def rank_size(self) -> int:
        return math.prod((self.sharded_group_info.rank_size, self.unsharded_group_info.rank_size))

    @property
    def shard_size(self) -> int:
        return self.sharded_group_info.rank_size

    @property
    def dp_size(self) -> int:
        """``rank_size // shard_size``: number of copies of each shard."""
        return self.rank_size // self.shard_size

    @property
    def reduction(self) -> tuple[str, ...]:
        """The collectives of one gradient reduction, in order."""
        steps = ("reduce_scatter",) * (self.shard_size > 1) + ("all_reduce",) * (self.dp_size > 1)
        return steps
