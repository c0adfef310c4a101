"""The layouts on which an operator is tried: all combinations when there are few, else a seeded choice of them.

Layouts are described without a mesh, because the test process, which draws them, is not part of one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hyper_parallel.layout import Layout
from hyper_parallel.mesh import DeviceMesh
from hyper_parallel.placements import PackedShard, Partial, Placement, Replicate, Shard, on_dim, short


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


def draw_cases(
    shapes: Sequence[Sequence[int]],
    with_partial: Sequence[bool],
    wants_grad: Sequence[bool],
    mesh_ndim: int,
    limit: int,
    seed: str,
) -> list[Case]:
    """At most ``limit`` cases; every layout combination when there are no more than that."""
    rng = random.Random(seed)
    options = [tensor_placements(s, mesh_ndim, p) for s, p in zip(shapes, with_partial, strict=True)]
    if math.prod(map(len, options)) <= limit:
        combinations = list(itertools.product(*options))
    else:
        combinations = _some(options, shapes, limit, rng)
    return [Case(tuple(_as_entered(c, wants_grad, rng))) for c in combinations]


def _some(
    options: Sequence[Sequence[Placed]], shapes: Sequence[Sequence[int]], limit: int, rng: random.Random
) -> list[tuple[Placed, ...]]:
    """A third with one input sharded, a third with all inputs laid out alike, the rest at random."""
    whole = tuple(o[0] for o in options)
    found: dict[tuple[Placed, ...], None] = {whole: None}
    alone = [(*whole[:i], o, *whole[i + 1 :]) for i, some in enumerate(options) for o in some[1:]]
    found.update(dict.fromkeys(rng.sample(alone, min(len(alone), limit // 3))))
    for _ in range(limit // 3):
        first = rng.choice(options[0][1:])
        alike = (_counterpart(first, shapes[0], shapes[i], some) for i, some in enumerate(options))
        found.setdefault(tuple(alike))
    for _ in range(20 * limit):
        if len(found) >= limit:
            break
        found.setdefault(tuple(rng.choice(some) for some in options))
    return list(found)


def _counterpart(first: Placed, shape: Sequence[int], other: Sequence[int], options: Sequence[Placed]) -> Placed:
    """The layout of another operand that goes with ``first``, with dims aligned from the right as they broadcast."""

    def moved(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        dim = placement.dim - len(shape) + len(other)
        return on_dim(placement, dim) if dim >= 0 and other[dim] == shape[placement.dim] else Replicate()

    wanted = Placed(tuple(map(moved, first.placements)), first.swapped)
    return wanted if wanted in options else options[0]


def _as_entered(placed: Sequence[Placed], wants_grad: Sequence[bool], rng: random.Random) -> list[Placed]:
    """The inputs with gradients for all of them or some, some varying, some with transposed memory."""
    chance = rng.random()
    entered = []
    for one, wants in zip(placed, wants_grad, strict=True):
        grad = wants and (chance < 0.6 or (chance < 0.9 and rng.random() < 0.5))
        replicated = [a for a, p in enumerate(one.placements) if isinstance(p, Replicate)]
        varying = tuple(a for a in replicated if grad and rng.random() < 0.15)
        transposed = rng.random() < 0.2
        entered.append(Placed(one.placements, one.swapped, grad, varying, transposed))
    return entered
