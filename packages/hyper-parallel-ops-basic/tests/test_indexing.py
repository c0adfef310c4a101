"""Reading and writing parts of a tensor against plain torch, on all layouts; and no write is ever lost."""

import pytest
import torch

from hyper_parallel import PackedShard, Replicate, Shard, distribute_tensor
from hyper_parallel.comm_trace import CommTrace
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.checking import mesh_of

MATRIX = tensor(5, 6)
IDS = torch.tensor([0, 2, 1, 2])
COLUMNS = torch.tensor([False, True, False, True, True, False])
ROWS = torch.tensor([True, False, True, True, False])


DISTINCT = torch.tensor([4, 1, 0])
MASK = torch.tensor([[1, 0, 1, 1, 0, 0], [0] * 6, [1] * 6, [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()


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
        sample(MATRIX, (slice(None), COLUMNS)).options(name="mask of columns"),
        sample(MATRIX, tensor(5, 6, dtype=torch.bool)).options(name="mask of all"),
        sample(tensor(5, 6, 2), tensor(5, 6, dtype=torch.bool)).options(name="mask of two dims"),
        sample(MATRIX, slice(1, None)).options(name="part"),
        sample(tensor(9), slice(1, None, 3)).options(name="part with steps"),
        sample(MATRIX, (slice(None, -1), slice(2, 5))).options(name="block"),
        sample(MATRIX, -2).options(name="negative int"),
        sample(MATRIX, IDS - 3).options(name="negative ids"),
        sample(tensor(5, 6, dtype=torch.bool), (2, IDS)).options(name="bool"),
        sample(MATRIX, tensor(dtype=torch.int64)).options(name="int in a tensor"),
        sample(MATRIX, True).options(name="True"),
        sample(tensor(5, 3, 2), ROWS).options(name="mask of rows of matrices"),
        sample(tensor(3, 5, 2), (slice(1, None), ROWS)).options(name="mask behind a slice"),
        sample(MATRIX, (False, slice(1, None))).options(name="False"),
    )


class TestNarrow(Quick):
    op = torch.narrow
    samples = (sample(tensor(8, 3), 0, 2, 4), sample(MATRIX, -1, 1, 2), sample(MATRIX, 0, torch.tensor(1), 3))


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
    samples = (sample(MATRIX, 3, 1), sample(MATRIX, (1, 4)), sample(MATRIX, torch.tensor([1, 4])))


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
        sample(MATRIX, DISTINCT, tensor(3, 6)).options(name="ids"),
        sample(MATRIX, (slice(None), DISTINCT), tensor(5, 1)).options(name="ids of columns"),
        sample(MATRIX, (DISTINCT, IDS[1:]), tensor(3)).options(name="two ids"),
        sample(MATRIX, (DISTINCT[:2, None], DISTINCT), 2.0).options(name="broadcast ids"),
        sample(MATRIX, (2, [0, 3]), tensor(2)).options(name="int and list"),
        sample(MATRIX, ROWS, tensor(3, 6)).options(name="mask with rows"),
        sample(MATRIX, MASK, tensor(12)).options(name="mask with values"),
        sample(tensor(2, 6, 3), (slice(1, None), DISTINCT), tensor(1, 3, 3)).options(name="slice and ids"),
    )


class TestIndexPut(Quick):
    op = torch.index_put
    inplace = "index_put_"
    max_layouts = 15
    samples = (
        sample(MATRIX, (DISTINCT,), tensor(3, 6)),
        sample(MATRIX, (IDS,), tensor(4, 6), accumulate=True),
        sample(MATRIX, [IDS, IDS], tensor(4), True),
    )


class TestMaskedScatter(Quick):
    op = torch.masked_scatter
    inplace = "masked_scatter_"
    samples = (sample(MATRIX, MASK, tensor(4, 4)), sample(tensor(3, 5, 2), ROWS[:, None], tensor(18)))


class TestMaskedSelect(Quick):
    op = torch.masked_select
    samples = (sample(MATRIX, MASK), sample(MATRIX, COLUMNS))


class TestNonzero(Quick):
    op = torch.nonzero
    samples = (
        sample(tensor(5, 6, dtype=torch.int64, high=2)),
        sample(tensor(7, dtype=torch.bool), as_tuple=True),
        sample(tensor(2, 1, 3, dtype=torch.bool)),
    )


class TestWhere(Quick):
    op = torch.where
    samples = (
        sample(tensor(5, 6, dtype=torch.int64, high=2)),
        sample(MASK, MATRIX, tensor(6)),
        sample(MASK, MATRIX, 0.0),
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
def test_a_write_to_the_tensor_raises_while_a_copy_of_a_part_lives():
    x = spread(torch.zeros(8, 3), Shard(0))
    copies = (lambda: x[:3], lambda: x[5], lambda: x.split([3, 5])[0], lambda: x.unbind()[1], lambda: x[:3][0])
    for copy in copies:
        part = copy()
        with pytest.raises(RuntimeError, match="would change with it"):
            x.mul_(2)
        del part
    x.mul_(2)


@pytest.mark.ranks(4)
def test_sharded_values_travel_to_the_slice_that_they_are_written_to():
    """Windows that are shifted by one position, as the compressors of deepseek_v4 write them."""
    value = torch.randn(6, 2, 3)
    x, mine = spread(torch.zeros(7, 2, 5), Shard(0)), spread(value, Shard(0)).requires_grad_()
    factors = spread(torch.arange(7.0).view(7, 1, 1), Shard(0))
    with CommTrace() as trace:
        x[1:, :, :3] = mine
    assert trace.counts == {"all_to_all": 1}
    assert torch.equal(x.full_tensor()[1:, :, :3], mine.full_tensor())
    (x * factors).sum().backward()
    assert torch.equal(mine.grad.full_tensor(), torch.arange(1.0, 7).view(6, 1, 1).expand(6, 2, 3))


@pytest.mark.ranks(4)
def test_a_tensor_as_bound_of_a_slice_is_read():
    x, bound = spread(torch.arange(8.0), Replicate()), spread(torch.tensor(3), Replicate())
    assert x[:bound].shape == (3,)
    assert x[: bound + 1].shape == (4,)
