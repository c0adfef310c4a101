"""Reading and writing parts of a tensor against plain torch, on all layouts; and no write is ever lost."""

import pytest
import torch

from hyper_parallel import PackedShard, RedistributionError, Replicate, Shard, distribute_tensor, redistribute_policy
from hyper_parallel.comm_trace import CommTrace
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.checking import mesh_of

MATRIX = tensor(5, 6)
IDS = torch.tensor([0, 2, 1, 2])
ROWS = torch.tensor([True, False, True, True, False])


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 20


class TestGetItem(Quick):
    op = torch.Tensor.__getitem__
    samples = (
        sample(MATRIX, 1).options(name="int"),
        sample(tensor(8, 3), slice(2, 6)).options(name="kept"),
        sample(tensor(8, 3), (slice(None, None, 2), None)).options(name="step"),
        sample(tensor(2, 1, 6), (None, slice(1, 7), Ellipsis, -1)).options(name="mixed"),
        sample(MATRIX, slice(0, 0)).options(name="empty"),
        sample(MATRIX, [0, 2]).options(name="list"),
        sample(MATRIX, IDS).options(name="ids"),
        sample(tensor(2, 1, 6), (0, slice(None), IDS.view(2, 2))).options(name="int and ids"),
        sample(MATRIX, (IDS[:, None], IDS)).options(name="broadcast ids"),
        sample(MATRIX, ROWS).options(name="mask"),
    )


class TestNarrow(Quick):
    op = torch.narrow
    samples = (sample(tensor(8, 3), 0, 2, 4), sample(MATRIX, -1, 1, 2))


class TestSelect(Quick):
    op = torch.select
    samples = (sample(MATRIX, 1, -1), sample(tensor(2, 1, 6), 0, 1))


class TestSplit(Quick):
    op = torch.split
    samples = (sample(MATRIX, 2), sample(MATRIX, [1, 2, 3], -1), sample(tensor(8, 3), [4, 4]))


class TestChunk(Quick):
    op = torch.chunk
    samples = (sample(MATRIX, 2, 1), sample(tensor(8, 3), 4))


class TestTensorSplit(Quick):
    op = torch.tensor_split
    samples = (sample(MATRIX, 3, 1), sample(MATRIX, (1, 4)))


class TestUnbind(Quick):
    op = torch.unbind
    samples = (sample(MATRIX, 1), sample(tensor(2, 3)))


def written(x, index, value):
    x = x.clone()
    x[index] = value
    return x


class TestSetItem(Quick):
    op = written
    max_layouts = 15
    samples = (
        sample(MATRIX, slice(2, 5), 1.5).options(name="number"),
        sample(MATRIX, 1, tensor(6)).options(name="row"),
        sample(MATRIX, (slice(2, None), 1), tensor(3)).options(name="part of a column"),
        sample(MATRIX, (slice(None), slice(1, 5, 2)), tensor(5, 2)).options(name="steps"),
        sample(tensor(8, 3), slice(2, 6), tensor(4, 3)).options(name="kept"),
        sample(MATRIX, slice(2, None), tensor(1, 6)).options(name="broadcast"),
        sample(MATRIX, tensor(5, 6, dtype=torch.bool), -1.0).options(name="mask"),
    )


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((4,)), placements)


@pytest.mark.ranks(4)
def test_a_packed_weight_splits_without_communication():
    value = torch.randn(16, 3)
    with CommTrace() as trace:
        q, k, v = spread(value, Shard(0)).redistribute(placements=[PackedShard(0, (8, 4, 4))]).split([8, 4, 4])
    assert trace.counts.get("all_gather", 0) == 0
    assert [p.placements for p in (q, k, v)] == [(Shard(0),)] * 3
    assert torch.equal(torch.cat([p.full_tensor() for p in (q, k, v)]), value)


@pytest.mark.ranks(4)
def test_views_of_a_sharded_tensor_are_views():
    x = spread(torch.zeros(8, 3), Shard(0))
    x[::2].add_(1)
    x.narrow(1, 0, 1).fill_(5)
    first, _ = x.split([1, 2], 1)
    first[:4, 0] = 7
    want = torch.zeros(8, 3)
    want[::2] += 1
    want[:, :1] = 5
    want[:4, 0] = 7
    assert torch.equal(x.full_tensor(), want)


@pytest.mark.ranks(4)
def test_a_write_to_a_redistributed_copy_raises():
    x = spread(torch.zeros(8, 3), Shard(0))
    with pytest.raises(RedistributionError, match="sharded dimension"):
        x[:3]
    with redistribute_policy("auto"):
        part = x[:3]
        assert part.placements == (Replicate(),)
        for write in (lambda: part.add_(1), lambda: part[0].zero_(), lambda: part[0].uniform_()):
            with pytest.raises(RuntimeError, match="would be lost"):
                write()


@pytest.mark.ranks(4)
def test_a_target_that_cannot_be_written_raises():
    x = spread(torch.zeros(8, 3), Shard(0))
    ids = spread(torch.tensor([1, 2]), Replicate())
    with redistribute_policy("auto"), pytest.raises(RedistributionError, match="redistribute the target"):
        x[ids] = 1.0


@pytest.mark.ranks(4)
def test_a_tensor_as_bound_of_a_slice_is_read():
    x, bound = spread(torch.arange(8.0), Replicate()), spread(torch.tensor(3), Replicate())
    assert x[:bound].shape == (3,)
    assert x[: bound + 1].shape == (4,)
