"""Gradients of several replicated parameters in one all-reduce: those of one device, with fewer collectives."""

import pytest
import torch
from torch import nn

from hyper_parallel import CommTrace, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.context import module_call
from hyper_parallel.rules import join_gradients, local_of, remembered


def parts(mesh):
    torch.manual_seed(0)
    weights = [torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    x = torch.randn(5, 6, dtype=torch.float64)  # uneven over 2 ranks, and over 4
    spread = [nn.Parameter(distribute_tensor(w.detach(), mesh, [Replicate()])) for w in weights]
    return weights, spread, x, distribute_tensor(x, mesh, [Shard(0)])


def loss(weights, x, used=3):
    for weight in weights[:used]:
        x = (x * weight).sin()
    return x.pow(2).sum()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("used", [3, 2])
def test_gradients_of_one_device_in_one_all_reduce(used):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    weights, spread, x, shards = parts(mesh)
    loss(weights, x, used).backward()
    for _ in range(2):  # the second call uses what the first made
        for p in spread:
            p.grad = None
        with module_call():
            join_gradients(spread, "tp")
            value = loss(spread, shards, used)
        with CommTrace() as trace:
            value.backward()
        assert trace.counts == {"all_reduce": 1}
        for p, w in zip(spread, weights, strict=True):
            assert (p.grad is None) == (w.grad is None)
            if w.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), w.grad)


@pytest.mark.ranks(2)
def test_a_rank_without_a_gradient_takes_part():
    """Rank 1 uses one parameter less, as a rank without tokens for an expert does."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weights, spread, x, _ = parts(mesh)
    with module_call():
        join_gradients(spread, "tp")
        mine = [local_of(remembered(p, p.layout, frozenset([0]))) for p in spread]
        used = 3 - mesh.get_coordinate()[0]
        loss(mine, x, used).backward()
    (loss(weights, x, 3) + loss(weights, x, 2)).backward()
    for p, w in zip(spread, weights, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), w.grad)


@pytest.mark.ranks(2)
def test_second_derivatives_and_steps():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weights, spread, x, shards = parts(mesh)
    for _ in range(2):
        with module_call():
            join_gradients(spread, "tp")
            value = loss(spread, shards)
            first = torch.autograd.grad(value, spread, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), spread)
        wanted = torch.autograd.grad(loss(weights, x), weights, create_graph=True)
        expected = torch.autograd.grad(sum(g.pow(2).sum() for g in wanted), weights)
        for got, want in zip([*first, *second], [*wanted, *expected], strict=True):
            torch.testing.assert_close(got.full_tensor(), want)
        with torch.no_grad():  # a step: what was made before is not used after it
            for p, w, g in zip(spread, weights, wanted, strict=True):
                p -= 0.1 * distribute_tensor(g.detach(), mesh, [Replicate()])
                w -= 0.1 * g
