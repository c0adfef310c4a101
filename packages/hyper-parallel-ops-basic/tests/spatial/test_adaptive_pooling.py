"""Adaptive pooling: right for any layout, and free where positions divide evenly."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommTrace, Partial, Shard, distribute_tensor
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.placing import mesh_of


class Few(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 16


class TestAverage(Few):
    op = F.adaptive_avg_pool2d
    samples = (
        sample(tensor(3, 2, 5, 6), (2, 3)),
        sample(tensor(2, 2, 8, 5), (4, 1)),
        sample(tensor(2, 5, 6), 1).options(name="all_positions"),
        sample(tensor(3, 4, 12), (None, 8)),
    )


class TestAverage3d(Few):
    op = F.adaptive_avg_pool3d
    samples = (sample(tensor(2, 3, 4, 4, 3), (4, 2, 1)),)


class TestMaximum(Few):
    op = F.adaptive_max_pool2d
    samples = (
        sample(tensor(3, 2, 8, 4), (4, 2), return_indices=True),
        sample(tensor(2, 12, 6), (8, 5), return_indices=True),
        sample(tensor(3, 2, 8, 4), 1),
    )


class TestMaximum1d(Few):
    op = F.adaptive_max_pool1d
    samples = (sample(tensor(3, 2, 7), 3), sample(tensor(3, 2, 8), 4, return_indices=True))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("positions", "wanted", "counts"),
    [
        (8, 4, {}),
        (12, 8, {}),  # windows of different sizes
        (6, 1, {}),  # a pending sum
        (8, 6, {"all_to_all": 2}),
        (6, 4, {"all_to_all": 2}),
    ],
)
def test_even_positions_stay_in_place(positions, wanted, counts):
    x = distribute_tensor(torch.randn(2, 3, positions), mesh_of((4,)), [Shard(2)])
    with CommTrace() as trace:
        out = F.adaptive_avg_pool1d(x, wanted)
    assert trace.counts == counts
    assert out.placements == (Partial() if wanted == 1 else Shard(2),)
    torch.testing.assert_close(out.full_tensor(), F.adaptive_avg_pool1d(x.full_tensor(), wanted))
