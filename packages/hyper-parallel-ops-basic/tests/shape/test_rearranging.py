"""Joining, repeating and moving elements against plain torch, on all layouts."""

import pytest
import torch

from hyper_parallel import PackedShard, Replicate, Shard, distribute_tensor, redistribute_policy
from hyper_parallel.comm.trace import CommTrace
from hyper_parallel.testing import OpConformance, at_most, sample, tensor
from hyper_parallel.testing.checking import mesh_of

MATRIX, NARROW, VECTOR = tensor(5, 6), tensor(5, 2), tensor(6)


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 20


class TestCat(Quick):
    op = torch.cat
    max_collectives = at_most(all_to_all=1)
    samples = (sample([MATRIX, MATRIX]), sample((MATRIX, NARROW, MATRIX), dim=-1))


class TestStack(Quick):
    op = torch.stack
    max_collectives = at_most()
    samples = (sample([MATRIX, MATRIX], 1),)


class TestVStack(Quick):
    op = torch.vstack
    max_collectives = at_most()
    samples = (sample([MATRIX, VECTOR]), sample([VECTOR, VECTOR]))


class TestHStack(Quick):
    op = torch.hstack
    max_collectives = at_most(all_to_all=1)
    samples = (sample([MATRIX, NARROW]), sample([VECTOR, VECTOR]))


class TestFlip(Quick):
    op = torch.flip
    max_collectives = at_most(all_to_all=2)
    samples = (sample(MATRIX, [0]), sample(MATRIX, [1, -2]))


class TestRoll(Quick):
    op = torch.roll
    max_collectives = at_most(all_to_all=2)
    samples = (sample(MATRIX, 2, 1), sample(MATRIX, (1, 2), (0, 1)), sample(MATRIX, 2))


class TestRepeat(Quick):
    op = torch.Tensor.repeat
    max_collectives = at_most(all_to_all=1)
    samples = (sample(MATRIX, 2, 1), sample(VECTOR, (2, 1, 3)))


class TestTile(Quick):
    op = torch.tile
    max_collectives = at_most(all_to_all=1)
    samples = (sample(MATRIX, (2,)),)


class TestRepeatInterleave(Quick):
    op = torch.repeat_interleave
    max_collectives = at_most(all_gather=2, all_to_all=1)
    samples = (
        sample(MATRIX, 2, 0),
        sample(tensor(3, 8), 3, dim=1),
        sample(MATRIX, 2),
        sample(MATRIX, torch.tensor([1, 0, 3, 2, 1]), dim=0),
        sample(tensor(2, 6), torch.tensor([0, 0, 4, 0, 1, 0]), dim=-1),
        sample(tensor(3, 2), torch.tensor([0, 0, 0]), 0),
        sample(tensor(3, 5), torch.tensor([2, 0, 1]), 0, output_size=3),
        sample(tensor(5), torch.tensor([2])),
        sample(tensor(2, 3), torch.tensor([1, 0, 3, 2, 1, 0])),
        sample(torch.tensor([1, 0, 2])).options(name="positions"),
    )


class TestTril(Quick):
    op = torch.tril
    max_collectives = at_most()
    inplace = "tril_"
    samples = (sample(MATRIX), sample(tensor(2, 6, 5), -1))


class TestTriu(Quick):
    op = torch.triu
    max_collectives = at_most()
    inplace = "triu_"
    samples = (sample(MATRIX, 1), sample(tensor(2, 1), 0))


@pytest.mark.ranks(4)
def test_joining_along_the_sharded_dim_needs_no_communication():
    a, b = torch.randn(5, 3), torch.randn(8, 3)
    x, y = (distribute_tensor(t, mesh_of((4,)), [Shard(0)]) for t in (a, b))
    with CommTrace() as trace:
        joined = torch.cat([x, y])
        first, second = joined.split([5, 8])
    assert not trace.counts
    assert joined.placements == (PackedShard(0, (5, 8)),)
    assert first.placements == second.placements == (Shard(0),)
    assert torch.equal(joined.full_tensor(), torch.cat([a, b]))


def in_one_piece(x, y, joined, moved):
    """cat under the strict policy: the layout, what travels forward and backward, and the values."""
    with redistribute_policy("strict"), CommTrace() as trace:
        result = torch.cat([x, y])
        repeated = x.repeat(2, 1)
        (result.sum() + repeated.sum()).backward()
    assert result.placements == joined
    assert dict(trace.counts) == moved
    assert torch.equal(result.full_tensor(), torch.cat([x.full_tensor(), y.full_tensor()]))
    assert torch.equal(repeated.full_tensor(), x.full_tensor().repeat(2, 1))


@pytest.mark.ranks(4)
def test_joining_packed_pieces_packs_them_all():
    x = distribute_tensor(torch.randn(9, 3), mesh_of((4,)), [PackedShard(0, (5, 4))]).requires_grad_()
    y = distribute_tensor(torch.randn(6, 3), mesh_of((4,)), [Shard(0)])
    in_one_piece(x, y, (PackedShard(0, (5, 4, 6)),), {})


@pytest.mark.ranks(4)
def test_joining_over_two_axes_with_a_packed_piece_gives_its_packing_to_no_other():
    x = distribute_tensor(torch.arange(6.0).view(6, 1), mesh_of((2, 2)), [Replicate(), PackedShard(0, (4, 2))])
    y = distribute_tensor(torch.tensor([[7.0]]), mesh_of((2, 2)), [Shard(0), Replicate()])
    with redistribute_policy("auto"):
        assert torch.cat([y, x]).full_tensor().flatten().tolist() == [7.0, *range(6)]


@pytest.mark.ranks(4)
def test_joining_along_a_dim_that_two_axes_shard_moves_elements_once():
    a, b = (distribute_tensor(torch.randn(n, 3), mesh_of((2, 2)), [Shard(0), Shard(0)]) for n in (9, 6))
    in_one_piece(a.requires_grad_(), b, (Shard(0), Shard(0)), {"all_to_all": 4})


@pytest.mark.ranks(4)
def test_repeats_that_are_sharded_as_the_elements_are_gathered_and_the_copies_travel_once():
    x, repeats = torch.randn(5, 3), torch.tensor([0, 4, 1, 0, 2])
    ours, counts = (distribute_tensor(t, mesh_of((4,)), [Shard(0)]) for t in (x, repeats))
    with CommTrace() as trace:
        out = torch.repeat_interleave(ours, counts, 0)
    assert out.placements == (Shard(0),)
    assert trace.counts == {"all_gather": 1, "all_to_all": 1}
    assert torch.equal(out.full_tensor(), x.repeat_interleave(repeats, 0))


@pytest.mark.ranks(4)
def test_copies_that_stay_on_their_rank_travel_nowhere():
    x = distribute_tensor(torch.arange(4.0), mesh_of((4,)), [Shard(0)])
    repeats = distribute_tensor(torch.full((4,), 3), mesh_of((4,)), [Replicate()])
    with CommTrace() as trace:
        out = x.repeat_interleave(repeats)
    assert not trace.counts
    assert out.to_local().tolist() == [float(mesh_of((4,)).get_rank())] * 3


@pytest.mark.ranks(4)
def test_repeats_that_cannot_be_are_refused_on_every_rank():
    x = distribute_tensor(torch.arange(5.0), mesh_of((4,)), [Shard(0)])

    def repeat(*repeats, **options):
        return x.repeat_interleave(distribute_tensor(torch.tensor(repeats), mesh_of((4,)), [Shard(0)]), **options)

    for wrong, options in (((1, 2, 1, 1, -1), {}), ((3, 0, 1, 0, 4), {"output_size": 9}), ((1, 1, 1, 1), {})):
        with pytest.raises(RuntimeError):
            repeat(*wrong, **options)
    assert repeat(3, 0, 1, 0, 4, output_size=8, dim=-1).tolist() == [0.0, 0, 0, 2, 4, 4, 4, 4]
