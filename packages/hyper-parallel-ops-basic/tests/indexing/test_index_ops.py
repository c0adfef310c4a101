"""Reading and writing by index along a dimension, embedding and one-hot, against plain torch on all layouts."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import PackedShard, RedistributionError, Replicate, Shard, distribute_tensor, redistribute_policy
from hyper_parallel.comm.trace import CommTrace
from hyper_parallel.testing import OpConformance, at_most, sample, tensor
from hyper_parallel.testing.checking import mesh_of

MATRIX, ROWS, COLUMNS = tensor(5, 6), tensor(3, 6), tensor(5, 3)
IDS = torch.tensor([4, 0, 2])
ROW_IDS = torch.tensor([[4, 0, 1, 1, 3, 2], [0, 0, 2, 4, 4, 1], [2, 3, 3, 1, 0, 0]])
DISTINCT = torch.tensor([[4, 0, 1, 1, 3, 2], [0, 1, 2, 4, 4, 1], [2, 3, 3, 2, 0, 0]])
COLUMN_IDS = tensor(5, 3, dtype=torch.int64, high=6)


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 20


class TestIndexSelect(Quick):
    op = torch.index_select
    max_collectives = at_most(all_gather=2, all_to_all=2)
    samples = (sample(MATRIX, 0, IDS), sample(MATRIX, -1, IDS), sample(tensor(), 0, torch.tensor([0])))


class TestGather(Quick):
    op = torch.gather
    max_collectives = at_most(all_gather=2, all_to_all=2)
    samples = (
        sample(MATRIX, 0, ROW_IDS),
        sample(MATRIX, 1, COLUMN_IDS),
        sample(tensor(5), 0, torch.empty(2, 0, dtype=torch.int64)),
        sample(tensor(5, 6, 4), 1, ROW_IDS[:, :, None].expand(-1, -1, 3)).options(name="a part"),
    )


class TestIndexAdd(Quick):
    op = torch.index_add
    max_collectives = at_most(all_gather=4, all_to_all=4)  # of indices and of sources, by each mesh axis
    inplace = "index_add_"
    samples = (sample(MATRIX, 0, IDS, ROWS, alpha=2), sample(MATRIX, 1, IDS, COLUMNS))


class TestIndexCopy(Quick):
    op = torch.index_copy
    max_collectives = at_most(all_gather=4, all_to_all=4)
    inplace = "index_copy_"
    samples = (sample(MATRIX, 0, IDS, ROWS),)


class TestIndexFill(Quick):
    op = torch.index_fill
    max_collectives = at_most(all_gather=4, all_to_all=4)
    inplace = "index_fill_"
    samples = (sample(MATRIX, 1, IDS, 2.0), sample(MATRIX, 0, torch.tensor([-1, 2, -5]), 2.0))


class TestIndexReduce(Quick):
    op = torch.index_reduce
    max_collectives = at_most(all_gather=4, all_to_all=4)
    samples = (sample(MATRIX, 0, IDS, ROWS, "amax"),)


class TestScatter(Quick):
    op = torch.scatter
    max_collectives = at_most(all_gather=4, all_to_all=4)
    inplace = "scatter_"
    samples = (
        sample(MATRIX, 0, DISTINCT, ROWS),
        sample(MATRIX, 0, DISTINCT, 1.0),
        sample(MATRIX, 0, DISTINCT[:, :3], tensor(3, 3)).options(name="fewer columns"),
        sample(MATRIX, 0, DISTINCT[:, :0], 1.0).options(name="no columns"),
        sample(MATRIX, 1, torch.empty(0, dtype=torch.int64), 1.0).options(name="nothing"),
    )


class TestScatterAdd(Quick):
    op = torch.scatter_add
    max_collectives = at_most(all_gather=4, all_to_all=4)
    inplace = "scatter_add_"
    samples = (
        sample(MATRIX, 0, ROW_IDS, ROWS),
        sample(MATRIX, 1, COLUMN_IDS, COLUMNS),
        sample(tensor(5, 6, 4), 1, ROW_IDS[:, :, None].expand(-1, -1, 3), tensor(3, 6, 3)).options(name="a part"),
    )


class TestScatterReduce(Quick):
    op = torch.scatter_reduce
    max_collectives = at_most(all_gather=4, all_to_all=8)
    inplace = "scatter_reduce_"
    samples = (
        sample(MATRIX, 0, ROW_IDS, ROWS, "sum"),
        sample(MATRIX, 0, ROW_IDS, ROWS, reduce="amax"),
        sample(MATRIX, 0, ROW_IDS, ROWS, "mean", include_self=False),
        # PyTorch has no gradient of these.
        sample(tensor(5, 6, grad=False), 0, ROW_IDS, tensor(6, 7, grad=False), "amax").options(name="larger source"),
    )


class TestEmbedding(Quick):
    op = F.embedding
    max_collectives = at_most(all_gather=2, all_to_all=2)
    samples = (
        sample(tensor(2, 5, dtype=torch.int64, high=6), tensor(6, 5)),
        sample(tensor(2, 5, dtype=torch.int64, high=6), tensor(6, 5), padding_idx=-1),
        sample(tensor(3, dtype=torch.int64, high=2), tensor(2, 3)),
        sample(tensor(5, dtype=torch.int64, high=6), tensor(6, 5), scale_grad_by_freq=True),
    )


class TestOneHot(Quick):
    op = F.one_hot
    max_collectives = at_most(all_reduce=1)
    samples = (
        sample(tensor(2, 5, dtype=torch.int64), 7),
        sample(tensor(5, dtype=torch.int64)),
        sample(tensor(2, 3, dtype=torch.int64)),
    )


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((4,)), placements)


@pytest.mark.ranks(4)
def test_a_vocabulary_larger_than_a_rank_gives_no_nan():
    table = torch.full((5, 2), torch.nan)
    table[1] = 3.0
    weight = spread(table, Shard(0)).requires_grad_()
    ids = spread(torch.tensor([1, 1]), Replicate())
    with CommTrace() as trace:
        out = F.embedding(ids, weight).redistribute(placements=[Shard(0)])
    assert trace.counts == {"reduce_scatter": 1}
    assert torch.equal(out.full_tensor(), torch.full((2, 2), 3.0))
    out.backward(torch.ones(2, 2))
    assert torch.equal(weight.grad.full_tensor()[1], torch.full((2,), 2.0))


@pytest.mark.ranks(4)
def test_an_index_that_is_sharded_as_its_dim_fetches_what_it_asks_for():
    """And a sharded source goes where it belongs: mixtures of experts sort the tokens of all ranks like this."""
    torch.manual_seed(0)
    x, ids = torch.randn(6, 3, dtype=torch.float64), torch.tensor([5, 0, 0, 3, 1, 5, 2, 4, 4])
    back = torch.randn(9, 3, dtype=torch.float64)

    def there_and_back(x, ids, source):
        rows = x[ids] * source
        out = torch.zeros_like(x).index_add_(0, ids, rows)
        order = torch.empty_like(ids)
        order[ids.argsort(stable=True)] = ids
        return out + x.index_select(0, order[:6])

    plain = x.clone().requires_grad_()
    want = there_and_back(plain, ids, back)
    want.pow(2).sum().backward()
    mine, my_ids = spread(x, Shard(0)).requires_grad_(), spread(ids, Shard(0))
    with CommTrace() as trace:
        mine[my_ids].sum().backward()
    assert trace.counts == {"all_gather": 1, "all_to_all": 2}
    mine.grad = None
    got = there_and_back(mine, my_ids, spread(back, Shard(0)))
    assert got.placements == (Shard(0),)
    torch.testing.assert_close(got.full_tensor(), want)
    got.pow(2).sum().backward()
    torch.testing.assert_close(mine.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
def test_options_that_need_the_whole_table_are_refused():
    weight, ids = spread(torch.randn(5, 2), Shard(0)), spread(torch.tensor([1, 1]), Replicate())
    for option in ({"max_norm": 1.0}, {"sparse": True}):
        with pytest.raises(RedistributionError, match="whole table"):
            F.embedding(ids, weight, **option)


@pytest.mark.ranks(4)
def test_mixture_of_experts_scatters_back():
    """``zeros_like`` then ``index_add_``: a Replicate target, sources whose gradients arrive in terms."""
    torch.manual_seed(0)
    h, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    ids = torch.tensor([5, 0, 3])

    def moe(h, w, ids):
        out = torch.zeros_like(h)
        out.index_add_(0, ids, F.linear(h[ids], w).sigmoid() * 2)
        return out

    plain_h, plain_w = h.clone().requires_grad_(), w.clone().requires_grad_()
    moe(plain_h, plain_w, ids).sum().backward()
    for placement in (Replicate(), Shard(1)):
        x, weight = spread(h, placement).requires_grad_(), spread(w, placement).requires_grad_()
        out = moe(x, weight, spread(ids, Replicate()))
        assert torch.allclose(out.full_tensor(), moe(h, w, ids))
        out.sum().backward()
        assert torch.allclose(x.grad.full_tensor(), plain_h.grad)
        assert torch.allclose(weight.grad.full_tensor(), plain_w.grad)


@pytest.mark.ranks(4)
def test_sources_of_a_whole_target_are_gathered():
    torch.manual_seed(0)
    ids = torch.tensor([4, 0, 2])
    target, source = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    plain = [t.clone().requires_grad_() for t in (target, source)]
    mine = [spread(target, Replicate()).requires_grad_(), spread(source, Shard(0)).requires_grad_()]
    weights = torch.randn_like(target)
    plain[0].index_copy(0, ids, plain[1]).backward(weights)
    spread_ids = spread(ids, Shard(0))
    with redistribute_policy("strict"), CommTrace() as trace:
        mine[0].index_copy(0, spread_ids, mine[1]).backward(weights)
    assert trace.counts == {"all_gather": 2}
    for alone, own in zip(plain, mine, strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), alone.grad)


@pytest.mark.ranks(4)
def test_sources_that_are_written_into_a_whole_target_are_gathered_along_any_dim():
    torch.manual_seed(0)
    values = torch.randn(6, 5), torch.randint(6, (4, 5)), torch.randn(4, 5)
    wanted = values[0].clone().scatter_add_(0, *values[1:])
    for d in (0, 1):
        target, index, source = (spread(v, p) for v, p in zip(values, (Replicate(), Shard(d), Shard(d)), strict=True))
        with redistribute_policy("strict"), CommTrace() as trace:
            target.scatter_add_(0, index, source)
        assert trace.counts == {"all_gather": 2}
        assert torch.allclose(target.to_local(), wanted)


@pytest.mark.ranks(4)
def test_a_packed_dim_beside_a_sharded_index():
    """Index and indexed dim have other sections, or none: each is cut as it says."""
    torch.manual_seed(0)
    x, ids, rows = torch.randn(6, 3), torch.tensor([5, 0, 0, 3, 1, 5]), torch.randn(6, 3)
    square = ids[:, None].expand(6, 3)
    packed = PackedShard(0, (4, 2))
    for index_placement in (Shard(0), PackedShard(0, (3, 3))):
        mine, index, at = (spread(x, packed), spread(ids, index_placement), spread(square, index_placement))
        source = spread(rows, index_placement)
        with CommTrace() as trace:
            read = [mine[index], mine.index_select(0, index), mine.gather(0, at), F.embedding(index, mine)]
        assert trace.counts == {"all_gather": 4, "all_to_all": 4}
        for got in read:
            assert got.placements == (index_placement,)
            assert torch.equal(got.full_tensor(), x[ids])
        with CommTrace() as trace:
            added = [mine.index_add(0, index, source), mine.scatter_add(0, at, source)]
        assert trace.counts == {"all_gather": 2, "all_to_all": 2}
        for got in added:
            assert got.placements == (packed,)
            torch.testing.assert_close(got.full_tensor(), x.index_add(0, ids, rows))
    mine[spread(ids, Shard(0))] = spread(rows[ids], Shard(0))
    assert torch.equal(mine.full_tensor()[ids], rows[ids])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placed", [Shard(1), PackedShard(1, (3, 6))])
def test_an_index_that_is_smaller_goes_where_its_part_of_the_target_is(placed):
    torch.manual_seed(0)
    values = torch.randn(6, 9), torch.randint(6, (4, 5)), torch.randn(4, 5)
    wanted = values[0].clone().scatter_add_(0, *values[1:])
    weights = torch.arange(54.0).view(6, 9)
    moved, summed = {"all_to_all": 1}, {"all_reduce": 1}
    for at, source_at, *costs in (
        (Shard(1), Shard(1), {"all_to_all": 2}, moved),
        (Shard(1), Replicate(), moved, summed),
        (Replicate(), Shard(1), moved, moved),
        (Replicate(), Replicate(), {}, summed),
    ):
        target, gradient = spread(values[0], placed), spread(weights, placed)
        index, source = spread(values[1], at), spread(values[2], source_at).requires_grad_()
        with redistribute_policy("strict"), CommTrace() as forward:
            target.scatter_add_(0, index, source)
        with CommTrace() as backward:
            target.backward(gradient)
        assert [forward.counts, backward.counts] == costs
        assert target.placements == (placed,)
        assert torch.equal(target.full_tensor(), wanted)
        assert torch.equal(source.grad.full_tensor(), weights[:, :5].gather(0, values[1]))
    x, index = spread(values[0], Shard(1)), spread(values[1], Shard(1))
    with redistribute_policy("strict"), CommTrace() as trace:
        read = x.gather(0, index)
    assert trace.counts == {"all_to_all": 1}
    assert torch.equal(read.full_tensor(), values[0][:, :5].gather(0, values[1]))


@pytest.mark.ranks(4)
def test_a_rank_with_an_empty_piece_takes_part_in_second_derivatives():
    """Of elements that came from other ranks, and so go back."""
    values, ids = torch.randn(5), torch.tensor([4, 0, 0, 2])
    x = spread(values, Shard(0)).requires_grad_()
    counts = torch.tensor([1, 0, 1, 0, 2])  # how often each is picked
    for read in (torch.index_select, torch.gather):
        out = read(x.flip(0), 0, spread(ids, Replicate()))
        (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second.full_tensor(), 6 * values * counts)


def test_an_id_out_of_range_in_one_shard_ends_every_rank(tmp_path):
    """Only the rank that has the id sees it (a check by all would cost a collective per call): it raises, and its end
    is an error for those that wait for it."""
    script = """
        import sys, torch
        from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
        rank, store = int(sys.argv[1]), sys.argv[2]
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        table = distribute_tensor(torch.zeros(5, 2), mesh, [Replicate()])
        ids = distribute_tensor(torch.tensor([1, 2, 3, 9]), mesh, [Shard(0)])
        table[ids].sum().item()
    """
    start = [sys.executable, "-c", textwrap.dedent(script)]
    ranks = [
        subprocess.Popen([*start, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode for rank in ranks)
    assert "IndexError: index 9 is out of bounds" in errors[1]
    assert "RuntimeError" in errors[0]
