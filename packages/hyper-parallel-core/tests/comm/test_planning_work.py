"""The work of planning a redistribution grows with the number of ranks, not with its square."""

import itertools
from collections import Counter

import pytest

from hyper_parallel import PackedShard, Partial, Replicate, Shard
from hyper_parallel.comm import rank_blocks, steps
from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.sharding import shard_ranges
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import AxisGroup, MeshInfo

S0, S1, S2, R, P = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
PACKED = PackedShard(1, (400, 100, 97))


class PretendedMesh(MeshInfo):
    """A mesh of any size as one of its ranks sees it, without process groups: a plan needs none."""

    def __init__(self, shape, coordinate):
        self.shape, self.ndim, self.coordinate = shape, len(shape), coordinate
        self.names = tuple("abcd"[: len(shape)])
        self.layouts = {}

    def group(self, axes):
        along = (range(n) if a in axes else (self.coordinate[a],) for a, n in enumerate(self.shape))
        members = list(itertools.product(*along))
        return AxisGroup(axes, self.names, self, members, members.index(self.coordinate))

    def layout(self, placements):
        order = [[], [], []]
        for axis, placement in enumerate(placements):
            if isinstance(placement, (Shard, PackedShard)):
                order[placement.dim].append(axis)
        return Layout._intern(self, tuple(placements), tuple(map(tuple, order)))


@pytest.fixture
def work(monkeypatch):
    """Plan, and count the range intersections, the cuts of ranges, and the sizes added up."""
    counts = Counter()

    def counted(module, name):
        function = getattr(module, name)

        def call(*args):
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, call)

    counted(rank_blocks, "overlap")
    counted(shard_ranges, "clip")
    counted(shard_ranges, "chunk_bounds")
    counted(steps, "length_of")

    def work(mesh, before, after):
        counts.clear()
        info = PretendedMesh(mesh, tuple(n // 2 for n in mesh))
        plan = plan_transition(info.layout(before), info.layout(after), (3 * 4096 + 5, 597, 4099))
        assert plan.communicates
        return sum(counts.values())

    return work


MESHES = {1: [(256,), (4096,)], 2: [(16, 16), (64, 64)], 3: [(4, 8, 8), (16, 16, 16)], 4: [(4, 4, 4, 4), (8, 8, 8, 8)]}
PAIRS = [
    ([S0], [S1]),
    ([S0], [R]),
    ([P], [S0]),
    ([PACKED], [S2]),
    ([P], [PACKED]),
    ([S0, S0], [R, S1]),
    ([S0, S1], [S1, S0]),
    ([PACKED, S1], [S2, R]),
    ([P, P], [S0, S0]),
    ([S0, S0, S0], [R, R, S1]),
    ([S0, S0, S0], [R, R, R]),
    ([S0, S1, S2], [S2, S0, S1]),
    ([PACKED, S0, R], [R, R, S1]),
    ([R, S0, S0], [S1, R, R]),
    ([S0, S0, S0, S0], [R, R, S1, S1]),
    ([S0, S0, S1, R], [S1, S2, R, S0]),
    ([P, P, P, P], [S0, S0, S0, S0]),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_sixteen_times_the_ranks_are_at_most_sixteen_times_the_work(work, before, after):
    few, many = (work(mesh, before, after) for mesh in MESHES[len(before)])
    assert 0 < many <= 16 * few + 100
    assert many <= 40 * 4096  # a pair of ranks each would be 16 million
