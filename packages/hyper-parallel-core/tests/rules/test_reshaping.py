"""Layouts after a reshape hold the same elements in the same order, for every layout of small tensors."""

import itertools

import pytest

from hyper_parallel import Layout, PackedShard, Partial, Replicate, Shard
from hyper_parallel._rules.families.reshaping import reshaped_layout
from hyper_parallel.sharding.placements import is_shard
from hyper_parallel.sharding.shard_ranges import dim_intervals
from hyper_parallel.testing.layouts import tensor_placements

MESHES = ((3,), (2, 2))


def described(mesh, ndim):
    """A layout that needs no processes."""
    return Layout(mesh, ("a", "b")[: len(mesh)])(*["None"] * ndim)


def layouts(mesh, shape):
    """All layouts of a tensor of this shape."""
    for placed in tensor_placements(shape, len(mesh), with_partial=False):
        order = [[] for _ in shape]
        for axis, placement in enumerate(placed.placements):
            if is_shard(placement):
                packed = isinstance(placement, PackedShard)
                order[placement.dim].insert(0 if packed else len(order[placement.dim]), axis)
        turn = -1 if placed.swapped else 1
        yield described(mesh, len(shape)).with_order(placed.placements, tuple(tuple(axes[::turn]) for axes in order))


def held(layout, shape, coordinate):
    """Flat positions of the elements that a rank holds, in its own order."""
    positions = [0]
    for d, size in enumerate(shape):
        runs = dim_intervals(layout, shape, d, coordinate)
        positions = [p * size + i for p in positions for run in runs for i in range(*run)]
    return positions


def shapes_of(count, ndim):
    if ndim == 0:
        return [()] if count == 1 else []
    return [(n, *rest) for n in range(1, count + 1) if count % n == 0 for rest in shapes_of(count // n, ndim - 1)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("count", [6, 8])
def test_each_rank_holds_the_same_elements_before_and_after(mesh, count):
    shapes = [shape for ndim in (1, 2, 3) for shape in shapes_of(count, ndim) if shape.count(1) < 2]
    kept = 0
    for old, new in itertools.product(shapes, shapes):
        for layout in layouts(mesh, old):
            after, target = reshaped_layout(layout, old, new, Partial())
            pending = [a for a, p in enumerate(after.placements) if isinstance(p, Partial)]
            for coordinate in itertools.product(*map(range, mesh)):
                # Where the shard of a dim of size 1 has no place the first rank has the value, the others add nothing.
                first = tuple(0 if a in pending else c for a, c in enumerate(coordinate))
                assert held(target, old, first) == held(after, new, coordinate), (layout, old, new)
            kept += target == layout
    assert kept > len(shapes) ** 2


KEPT = {
    "an outermost factor": ((8, 3), (2, 4, 3), {0: Shard(0)}, {0: Shard(0)}),
    "two axes on two factors": ((8,), (2, 4), {0: Shard(0), 1: Shard(0)}, {0: Shard(0), 1: Shard(1)}),
    "and back": ((2, 4), (8,), {0: Shard(0), 1: Shard(1)}, {0: Shard(0), 1: Shard(0)}),
    "an inner factor": ((3, 4), (12,), {1: Shard(1)}, {1: PackedShard(0, (4, 4, 4))}),
    "heads and their features": ((5, 4, 2), (5, 8), {1: Shard(1)}, {1: Shard(1)}),
    "sections become rows": ((12,), (3, 4), {1: PackedShard(0, (4, 4, 4))}, {1: Shard(1)}),
    "sections of rows": ((6, 4), (24,), {0: PackedShard(0, (4, 2))}, {0: PackedShard(0, (16, 8))}),
    "pieces that end within a chunk": ((3, 2), (6,), {0: Shard(0)}, {0: Replicate()}),
    "empty pieces": ((4, 2), (2, 2, 2), {1: Shard(1)}, {1: Shard(2)}),
    "sizes that share no factor": ((6, 4), (4, 6), {0: Shard(0)}, {0: Shard(0)}),
    "size 1 to size 1": ((1, 5), (5, 1), {0: Shard(0)}, {0: Shard(1)}),
    "size 1 vanishes": ((1, 5), (5,), {0: Shard(0), 1: Shard(1)}, {0: Partial(), 1: Shard(0)}),
    "no elements": ((2, 0, 3), (2, 3, 0, 7), {0: Shard(0), 1: Shard(2)}, {0: Shard(0), 1: Replicate()}),
}


@pytest.mark.parametrize("name", KEPT)
def test_where_the_shards_of_a_reshaped_tensor_are(name):
    old, new, before, after = KEPT[name]
    found, _ = reshaped_layout(described((2, 2), len(old)).with_placements(before), old, new, Partial())
    assert found.placements == tuple(after.get(a, Replicate()) for a in range(2))


def test_an_axis_of_one_rank_stays_beside_the_axis_before_it():
    """Rows of a batch over two data axes, of which one has one rank: a sequence is not a place for it."""
    layout = described((2, 1), 2).with_placements({0: Shard(0), 1: Shard(0)})
    assert reshaped_layout(layout, (22, 4), (2, 11, 4), Partial())[0].placements == (Shard(0), Shard(0))
