"""Operators that only rearrange, on all layouts."""

import pytest
import torch

from hyper_parallel import CommTrace, Partial, Replicate, Shard, distribute_tensor, redistribute_policy
from hyper_parallel.testing import OpConformance, at_most, sample, tensor
from hyper_parallel.testing.placing import mesh_of


class Views(OpConformance):
    meshes = ((2,), (4,), (2, 2))
    max_layouts = 24


class TestView(Views):
    op = torch.Tensor.view
    max_collectives = at_most()
    samples = (
        sample(tensor(8), 2, 4),
        sample(tensor(4, 6), 24),
        sample(tensor(4, 6), (-1, 3)),
        sample(tensor(2, 4, 6), 8, 6),
        sample(tensor(2, 4, 6), 2, 4, 2, 3),
        sample(tensor(6, 4), 4, 6),
        sample(tensor(5, 3), 1, 5, 1, 3),
        sample(tensor(0, 4), 4, 0),
        sample(tensor(2, 0, 3), 2, 5, 0),
        sample(tensor(1, 6), 6),
        sample(tensor(6, 1), 1, 3, 2),
        sample(torch.ones(1, 5, dtype=torch.bool), 5),
        sample(tensor(1), ()),
    )


class TestViewAsDtype(Views):
    op = torch.Tensor.view
    max_collectives = at_most()
    samples = (
        sample(tensor(5, 6, dtype=torch.int32), torch.float32),
        sample(tensor(5, 6, dtype=torch.int64), torch.int16).options(name="more_elements"),
        sample(tensor(5, 4, dtype=torch.int16), dtype=torch.int32).options(name="fewer_elements"),
        sample(tensor(dtype=torch.int32), torch.float32).options(name="number"),
    )


class TestReshape(Views):
    op = torch.reshape
    max_collectives = at_most()
    samples = (
        sample(tensor(4, 6), (2, 2, 6)),
        sample(tensor(3, 5), (15,)),
        sample(tensor(12, 2), (4, -1)),
        sample(tensor(16, 3), (2, 2, 12)),
        sample(tensor(4, 3, 4, 2), (12, 8)),
    )


class TestFlatten(Views):
    op = torch.flatten
    max_collectives = at_most()
    samples = (sample(tensor(2, 4, 6)), sample(tensor(2, 4, 6), 1), sample(tensor(2, 4, 6), start_dim=0, end_dim=1))


class TestUnflatten(Views):
    op = torch.unflatten
    max_collectives = at_most()
    samples = (sample(tensor(8, 3), 0, (4, 2)), sample(tensor(5, 8), -1, (2, -1)))


class TestSqueeze(Views):
    op = torch.squeeze
    max_collectives = at_most()
    samples = (
        sample(tensor(1, 5, 1)),
        sample(tensor(1, 5, 1), 0),
        sample(tensor(1, 5), (0, 1)),
        sample(tensor(5, 3), 1),
        sample(torch.tensor([[True, False]]), 0),
    )


class TestUnsqueeze(Views):
    op = torch.unsqueeze
    max_collectives = at_most()
    samples = (sample(tensor(5, 3), 0), sample(tensor(5, 3), -1), sample(tensor(1), 0), sample(tensor(2, 0), 1))


class TestTranspose(Views):
    op = torch.transpose
    max_collectives = at_most()
    samples = (sample(tensor(5, 3), 0, 1), sample(tensor(2, 3, 5), dim0=-1, dim1=0))


class TestPermute(Views):
    op = torch.permute
    max_collectives = at_most()
    samples = (sample(tensor(2, 3, 5), (2, 0, 1)), sample(tensor(2, 3, 5), dims=(0, -1, 1)))


class TestMovedim(Views):
    op = torch.movedim
    max_collectives = at_most()
    samples = (sample(tensor(2, 3, 5), 0, 2), sample(tensor(2, 3, 5), (0, 1), (-1, 0)))


class TestExpand(Views):
    op = torch.Tensor.expand
    max_collectives = at_most()
    samples = (
        sample(tensor(5, 1), 5, 4),
        sample(tensor(3), 2, 3),
        sample(tensor(5, 1), -1, 3),
        sample(tensor(1), 2, 1),
    )


class TestExpandAs(Views):
    op = torch.Tensor.expand_as
    max_collectives = at_most()
    samples = (sample(tensor(5, 1), tensor(5, 4)),)


def matrix_transposes(x):
    return x.T + x.t() + x.mT.contiguous() + x.H + x.mH


class TestMatrixTransposes(Views):
    op = matrix_transposes
    max_collectives = at_most()
    samples = (sample(tensor(5, 3)),)


def viewed_rows(x):
    return torch.stack([row.view(-1) for row in x.transpose(0, 1).unbind(1)])


class TestViewsOfUnboundRows(Views):
    """Each is dense on one device, and where it is a copy."""

    op = viewed_rows
    max_collectives = at_most(all_gather=1)
    samples = (sample(tensor(3, 5, 4)),)


@pytest.mark.ranks(4)
def test_sharded_heads_survive_a_norm_over_all_of_them():
    """``[batch, tokens, heads, features]`` flattened to rows, and back to ``[batch, tokens, heads * features]``."""
    x = torch.randn(4, 3, 4, 2)
    sharded = distribute_tensor(x, mesh_of((2, 2)), [Shard(0), Shard(2)])
    with CommTrace() as trace:
        rows = sharded.reshape(-1, 2)
        out = rows.reshape(4, 3, -1)
    assert trace.counts == {}
    assert out.placements == (Shard(0), Shard(2))
    torch.testing.assert_close(out.full_tensor(), x.reshape(4, 3, 8))


ONES = {
    "squeeze": lambda x: x.squeeze(0),
    "view": lambda x: x.view(-1),
    "flatten": lambda x: x.flatten(),
    "reshape": lambda x: x.reshape(2, 3),
    "expand": lambda x: x.expand(4, 6),
    "broadcast_to": lambda x: x.broadcast_to(2, 4, 6),
    "select": lambda x: x[0],
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ONES)
@pytest.mark.parametrize(
    "placements", [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1))], ids=str
)
def test_a_sharded_dim_of_size_1_that_vanishes_or_grows_communicates_nothing(name, placements):
    """One rank has the elements: the value of a pending sum. As a lookup along a sharded dim, it is reduced when it is
    used."""
    value = torch.randn(1, 6)
    plain, x = value.clone().requires_grad_(), distribute_tensor(value, mesh_of((2, 2)), placements).requires_grad_()
    weight = distribute_tensor(torch.ones(()), mesh_of((2, 2)), [Replicate()] * 2)
    with CommTrace() as trace:
        out = ONES[name](x)
        loss = (out * weight).sum()
        loss.backward()
    assert not trace.counts
    assert [isinstance(p, Partial) for p in out.placements] == [p == Shard(0) for p in placements]
    want = ONES[name](plain)
    want.sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
def test_views_in_place_change_the_tensor_and_share_its_memory():
    mesh = mesh_of((4,))
    x = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    whole, row = x[:, :], x[:, 0]
    assert x.unsqueeze_(0) is x
    assert x.shape == (1, 5, 3)
    assert x.placements == (Shard(1),)
    x.squeeze_(0).t_().mul_(2)
    assert x.placements == (Shard(1),)
    assert torch.equal(x.full_tensor(), torch.arange(15.0).view(5, 3).t() * 2)
    assert torch.equal(whole.full_tensor(), torch.arange(15.0).view(5, 3) * 2)
    assert torch.equal(row.full_tensor(), torch.arange(15.0).view(5, 3)[:, 0] * 2)
    leaf = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf.unsqueeze_(0)
    out = leaf * 2
    out.unsqueeze_(-1).transpose_(0, 1)
    assert out.shape == (3, 4, 1)
    out.square().sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.full((4, 3), 8.0))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16], ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_bits_written_through_a_view_as_another_dtype_reach_the_tensor(placement, dtype):
    value = torch.arange(1.0, 25.0).view(4, 6)
    x = distribute_tensor(value, mesh_of((4,)), [placement])
    with redistribute_policy("auto"):
        for target in (x, value):
            bits = target.view(dtype)
            bits[1:3] = 0
            bits[0].fill_(16256)
    assert x.placements == (placement,)
    assert torch.equal(x.full_tensor(), value)
