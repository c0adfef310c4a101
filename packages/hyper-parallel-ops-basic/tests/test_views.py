"""Operators that only rearrange, on all layouts."""

import pytest
import torch

from hyper_parallel import CommTrace, Shard, distribute_tensor
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.placing import mesh_of


class Views(OpConformance):
    meshes = ((2,), (4,), (2, 2))
    max_layouts = 24


class TestView(Views):
    op = torch.Tensor.view
    samples = (
        sample(tensor(8), 2, 4),
        sample(tensor(4, 6), 24),
        sample(tensor(4, 6), (-1, 3)),
        sample(tensor(2, 4, 6), 8, 6),
        sample(tensor(2, 4, 6), 2, 4, 2, 3),
        sample(tensor(6, 4), 4, 6),
        sample(tensor(5, 3), 1, 5, 1, 3),
        sample(tensor(0, 4), 4, 0),
        sample(tensor(1), ()),
    )


class TestReshape(Views):
    op = torch.reshape
    samples = (
        sample(tensor(4, 6), (2, 2, 6)),
        sample(tensor(3, 5), (15,)),
        sample(tensor(12, 2), (4, -1)),
        sample(tensor(16, 3), (2, 2, 12)),
        sample(tensor(4, 3, 4, 2), (12, 8)),
    )


class TestFlatten(Views):
    op = torch.flatten
    samples = (sample(tensor(2, 4, 6)), sample(tensor(2, 4, 6), 1), sample(tensor(2, 4, 6), start_dim=0, end_dim=1))


class TestUnflatten(Views):
    op = torch.unflatten
    samples = (sample(tensor(8, 3), 0, (4, 2)), sample(tensor(5, 8), -1, (2, -1)))


class TestSqueeze(Views):
    op = torch.squeeze
    samples = (sample(tensor(1, 5, 1)), sample(tensor(1, 5, 1), 0), sample(tensor(5, 3), 1))


class TestUnsqueeze(Views):
    op = torch.unsqueeze
    samples = (sample(tensor(5, 3), 0), sample(tensor(5, 3), -1))


class TestTranspose(Views):
    op = torch.transpose
    samples = (sample(tensor(5, 3), 0, 1), sample(tensor(2, 3, 5), dim0=-1, dim1=0))


class TestPermute(Views):
    op = torch.permute
    samples = (sample(tensor(2, 3, 5), (2, 0, 1)), sample(tensor(2, 3, 5), dims=(0, -1, 1)))


class TestMovedim(Views):
    op = torch.movedim
    samples = (sample(tensor(2, 3, 5), 0, 2), sample(tensor(2, 3, 5), (0, 1), (-1, 0)))


class TestExpand(Views):
    op = torch.Tensor.expand
    samples = (sample(tensor(5, 1), 5, 4), sample(tensor(3), 2, 3), sample(tensor(5, 1), -1, 3))


class TestExpandAs(Views):
    op = torch.Tensor.expand_as
    samples = (sample(tensor(5, 1), tensor(5, 4)),)


def matrix_transposes(x):
    return x.T + x.t() + x.mT.contiguous() + x.H + x.mH


class TestMatrixTransposes(Views):
    op = matrix_transposes
    samples = (sample(tensor(5, 3)),)


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
