"""The layouts that an input of an operator can have.

They are described without a mesh, because the test process, which chooses them, is not part of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import DeviceMesh
from hyper_parallel.sharding.placements import PackedShard, Partial, Placement, Replicate, Shard, short


@dataclass(frozen=True)
class Placed:
    """How one tensor input lies on the mesh, and as what it enters.

    Attributes:
        placements: one per mesh axis.
        swapped: whether two axes that shard one dim do so in the order (1, 0).
        grad: whether it needs a gradient.
        varying: axes on which it is Replicate with a Partial gradient.
        transposed: whether its memory is laid out with the last dim outermost.
    """

    placements: tuple[Placement, ...]
    swapped: bool = False
    grad: bool = False
    varying: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def shard_order(self) -> dict[int, tuple[int, ...]] | None:
        """The order to give to a Layout; None for the usual one."""
        if not self.swapped:
            return None
        return {p.dim: (1, 0) for p in self.placements if isinstance(p, Shard)}

    def layout(self, mesh: DeviceMesh, ndim: int) -> Layout:
        """The layout on a mesh."""
        return Layout.from_placements(mesh, self.placements, ndim=ndim, shard_order=self.shard_order)

    def __str__(self) -> str:
        text = ",".join(map(short, self.placements)) + (" swapped" if self.swapped else "")
        notes = ["grad"] * self.grad + ["varying " + ",".join(map(str, self.varying))] * bool(self.varying)
        notes += ["non-contiguous"] * self.transposed
        return f"{text} ({', '.join(notes)})" if notes else text


@dataclass(frozen=True)
class Case:
    """One layout per tensor input. ``outputs``: the output placements that a strategy promises for it."""

    inputs: tuple[Placed, ...]
    outputs: tuple[tuple[Placement, ...], ...] | None = field(default=None)


def axis_placements(shape: Sequence[int], with_partial: bool) -> list[Placement]:
    """What one mesh axis can do with a tensor of this shape."""
    found: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    if with_partial:
        found.append(Partial())
    for d, size in enumerate(shape):
        if size > 1:
            inner = size // 3 or 1
            found.append(PackedShard(d, (size - inner, inner)))
    return found


def tensor_placements(shape: Sequence[int], mesh_ndim: int, with_partial: bool) -> list[Placed]:
    """All layouts of a tensor on a mesh of one or two axes."""
    single = axis_placements(shape, with_partial)
    found = []
    for placements in itertools.product(single, repeat=mesh_ndim):
        sharded = [p for p in placements if isinstance(p, Shard)]
        same_dim = len(sharded) == 2 and sharded[0].dim == sharded[1].dim
        packed = [p for p in sharded if isinstance(p, PackedShard)]
        if same_dim and len(packed) == 2:
            continue  # only the outermost shard of a dim can be packed
        found.append(Placed(placements))
        if same_dim and not packed:
            found.append(Placed(placements, swapped=True))
    return found
