"""Products that contract dimensions, on all layouts."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommTrace, Partial, Replicate, Shard, distribute_tensor, redistribute_policy
from hyper_parallel.testing import OpConformance, at_most, mesh_of, sample, tensor

WHOLE = partial(tensor, dtype=torch.int64)


class Products(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 20


class TestMatmul(Products):
    op = torch.matmul
    max_collectives = at_most()
    samples = (
        sample(tensor(5, 6), tensor(6, 3)),
        sample(tensor(5), tensor(5)),
        sample(tensor(5, 6), tensor(6)),
        sample(tensor(6), tensor(2, 6, 3)),
        sample(tensor(2, 1, 5, 6), tensor(3, 6, 2)),
        sample(other=tensor(4, 4), input=tensor(4, 4)),
    )


class TestMm(Products):
    op = torch.mm
    max_collectives = at_most(all_gather=1, all_reduce=1)
    out = True
    samples = (sample(tensor(2, 5), tensor(5, 3)),)


class TestBmm(Products):
    op = torch.bmm
    max_collectives = at_most()
    samples = (sample(tensor(3, 2, 5), tensor(3, 5, 4)),)


class TestLinear(Products):
    op = F.linear
    max_collectives = at_most()
    samples = (
        sample(tensor(5, 6), tensor(3, 6)),
        sample(tensor(5, 6), tensor(3, 6), tensor(3)),
        sample(tensor(2, 5, 6), tensor(7, 6), bias=tensor(7)),
        sample(tensor(5, 6), tensor(6)),
        sample(tensor(6), tensor(3, 6), tensor(3)),
    )


class TestAddmm(Products):
    op = torch.addmm
    max_collectives = at_most()
    inplace = "addmm_"
    samples = (sample(tensor(5, 3), tensor(5, 6), tensor(6, 3), beta=0.5, alpha=2.0),)


class TestAddmmWithBroadcast(Products):
    op = torch.addmm
    max_collectives = at_most()
    samples = (
        sample(tensor(3), tensor(5, 6), tensor(6, 3)),
        sample(tensor(5, 1), tensor(5, 6), tensor(6, 3)),
        sample(WHOLE(3), WHOLE(5, 6), WHOLE(6, 3), alpha=0.5, beta=1.5).options(name="whole numbers"),
    )


class TestBaddbmm(Products):
    op = torch.baddbmm
    max_collectives = at_most()
    samples = (sample(tensor(3, 2, 4), tensor(3, 2, 5), tensor(3, 5, 4)),)


class TestAddbmm(Products):
    op = torch.addbmm
    max_collectives = at_most()
    samples = (
        sample(tensor(2, 4), tensor(3, 2, 5), tensor(3, 5, 4)),
        sample(batch2=tensor(3, 5, 4), batch1=tensor(3, 2, 5), input=tensor(2, 4)),
        sample(WHOLE(2, 4), WHOLE(3, 2, 5), WHOLE(3, 5, 4), alpha=2.5, beta=-1.5).options(name="whole numbers"),
    )


class TestAddmv(Products):
    op = torch.addmv
    max_collectives = at_most()
    samples = (
        sample(tensor(5), tensor(5, 6), tensor(6)),
        sample(tensor(1), tensor(3, 6), tensor(6)),
        sample(tensor(), tensor(3, 6), tensor(6)),
        sample(WHOLE(1), WHOLE(3, 6), WHOLE(6), beta=2.5).options(name="whole numbers"),
        sample(tensor(1), mat=tensor(3, 6), vec=tensor(6)),
        sample(vec=tensor(6), input=tensor(1), mat=tensor(3, 6)),
    )


class TestEinsum(Products):
    op = torch.einsum
    max_collectives = at_most()
    samples = (
        sample("bqd,bkd->bqk", tensor(2, 3, 4), tensor(2, 5, 4)),
        sample("...ij,jk->...ik", tensor(2, 3, 4), tensor(4, 5)),
        sample("ij,ij->", tensor(3, 4), tensor(3, 4)),
        sample("i,j,k->ijk", tensor(2), tensor(3), tensor(5)),
        sample("ij,jk", tensor(3, 4), tensor(4, 5)),
        sample("bii->bi", tensor(5, 3, 3)),
        sample("ii,ij->j", tensor(4, 4), tensor(4, 6)),
        sample("ii->", tensor(5, 5)),
        sample("iji,jkj->ik", tensor(3, 5, 3), tensor(5, 2, 5)),
        sample("iii->i", tensor(6, 6, 6)),
    )


@pytest.mark.ranks(4)
def test_a_diagonal_of_which_either_dim_or_both_are_sharded():
    torch.manual_seed(0)
    value, weights = torch.randn(5, 5), torch.randn(5)
    mesh = mesh_of((2, 2))
    for placements, given in (
        ([Shard(0), Replicate()], (Shard(0), Replicate())),
        ([Replicate(), Shard(1)], (Replicate(), Shard(0))),
        ([Shard(1), Shard(1)], (Shard(0), Shard(0))),
        ([Shard(1), Shard(0)], (Partial(), Shard(0))),
    ):
        x = distribute_tensor(value, mesh, placements).requires_grad_()
        seed = distribute_tensor(weights, mesh, [Replicate()] * 2)
        with redistribute_policy("strict"), CommTrace() as trace:
            out = torch.einsum("ii->i", x)
        assert not trace.counts
        assert out.placements == given
        assert torch.equal(out.full_tensor(), value.diagonal())
        out.backward(seed)
        assert torch.equal(x.grad.full_tensor(), weights.diag())
