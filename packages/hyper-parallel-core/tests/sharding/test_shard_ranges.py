"""Which global indices a rank holds."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import Layout, PackedShard, Shard
from hyper_parallel.sharding.shard_ranges import box, chunk_bounds, clip, dim_intervals, local_shape

NAMES = ("dp", "tp", "pp")


def indices(intervals):
    return [i for start, stop in intervals for i in range(start, stop)]


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(size, parts):
    pieces = [p.tolist() for p in torch.arange(size).chunk(parts)] if size else []
    pieces += [[]] * (parts - len(pieces))  # torch.chunk leaves empty pieces out
    assert [list(range(*chunk_bounds(size, parts, i))) for i in range(parts)] == pieces


def test_clip_counts_positions():
    assert clip(((2, 5), (8, 10)), 1, 4) == ((3, 5), (8, 9))
    assert clip(((2, 5),), 3, 9) == ()


@st.composite
def layouts(draw):
    """A layout that describes its mesh only, and a shape."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    dims = [draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh]
    order = [draw(st.permutations([a for a, d in enumerate(dims) if d == dim])) for dim in range(len(shape))]
    names = NAMES[: len(mesh)]
    layout = Layout(mesh, names)(*(tuple(names[a] for a in axes) for axes in order))
    placements = list(layout.placements)
    for dim, axes in enumerate(order):
        if axes and draw(st.booleans()):
            first = draw(st.integers(0, shape[dim]))
            placements[axes[0]] = PackedShard(dim, (first, shape[dim] - first))
    return layout.with_order(tuple(placements), layout.shard_order), shape


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_every_index_is_held_once_by_each_replica_group(drawn):
    layout, shape = drawn
    held: Counter[tuple[int, ...]] = Counter()
    for coordinate in itertools.product(*map(range, layout.mesh_shape)):
        mine = box(layout, shape, coordinate)
        assert local_shape(layout, shape, coordinate) == tuple(len(indices(dim)) for dim in mine)
        held.update(itertools.product(*map(indices, mine)))
    replicas = 1
    for size, placement in zip(layout.mesh_shape, layout.placements, strict=True):
        replicas *= 1 if isinstance(placement, Shard) else size
    assert set(held) == set(itertools.product(*map(range, shape)))
    assert set(held.values()) <= {replicas}


def test_order_of_axes():
    both = Layout((2, 2), ("dp", "tp"))
    outer_dp, outer_tp = both(("dp", "tp")), both(("tp", "dp"))
    assert [indices(dim_intervals(outer_dp, (8,), 0, c)) for c in [(0, 0), (0, 1), (1, 0), (1, 1)]] == [
        [0, 1], [2, 3], [4, 5], [6, 7],
    ]  # fmt: skip
    assert [indices(dim_intervals(outer_tp, (8,), 0, c)) for c in [(0, 0), (0, 1), (1, 0), (1, 1)]] == [
        [0, 1], [4, 5], [2, 3], [6, 7],
    ]  # fmt: skip


def test_sections_are_sharded_on_their_own():
    plain = Layout((2,), ("tp",))("tp", "None")
    packed = plain.with_order((PackedShard(0, (4, 3)),), plain.shard_order)
    assert dim_intervals(packed, (7, 2), 0, (0,)) == ((0, 2), (4, 6))
    assert dim_intervals(packed, (7, 2), 0, (1,)) == ((2, 4), (6, 7))
    assert local_shape(packed, (7, 2), (1,)) == (3, 2)


def test_shard_of_a_packed_shard_cuts_the_local_piece():
    plain = Layout((2, 2), ("tp", "dp"))(("tp", "dp"))
    packed = plain.with_order((PackedShard(0, (4, 4)), Shard(0)), plain.shard_order)
    assert [indices(dim_intervals(packed, (8,), 0, (0, d))) for d in range(2)] == [[0, 1], [4, 5]]
