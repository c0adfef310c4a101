"""What the patterns of training cost, and no more: the table of docs/gradient-types.md, counted, values compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommTrace, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

R, P = Replicate(), Partial()


def mesh4():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def leaf(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def spread(tensor, placement):
    return distribute_tensor(tensor, mesh4(), [placement], src_data_rank=None)


def costs(function, *distributed, seed=None):
    """Collectives of the forward and of the backward, and the result."""
    with CommTrace() as trace:
        out = function(*distributed)
        forward = trace.counts
        out.backward(seed if out.numel() > 1 else None)
    return forward, trace.counts - forward, out


def check(out, plain, pairs):
    torch.testing.assert_close(out.full_tensor().detach(), plain.detach())
    for distributed, single in pairs:
        assert distributed.grad.placements == distributed.placements
        torch.testing.assert_close(distributed.grad.full_tensor(), single.grad)


@pytest.mark.ranks(4)
def test_colwise_then_rowwise_with_a_replicated_input():
    x, up, down = leaf(6, 8), leaf(16, 8, seed=1), leaf(8, 16, seed=2)

    def block(x, up, down):
        return F.linear(F.silu(F.linear(x, up)), down)

    plain = block(x, up, down)
    plain.backward(torch.ones_like(plain))
    dx, du, dd = spread(x, R), spread(up, Shard(0)), spread(down, Shard(1))
    seed = spread(torch.ones_like(plain), R)
    forward, backward, out = costs(lambda *a: block(*a).reduce_partial(), dx, du, dd, seed=seed)
    assert forward == {"all_reduce": 1}
    assert backward == {"all_reduce": 1}
    check(out, plain, [(dx, x), (du, up), (dd, down)])


@pytest.mark.ranks(4)
def test_the_same_with_sequence_parallel():
    x, up, down = leaf(8, 8), leaf(16, 8, seed=1), leaf(8, 16, seed=2)
    plain = F.linear(F.silu(F.linear(x, up)), down)
    plain.backward(torch.ones_like(plain))
    dx, du, dd = spread(x, Shard(0)), spread(up, Shard(0)), spread(down, Shard(1))

    def block(x, up, down):
        gathered = x.redistribute(placements=[R])
        return F.linear(F.silu(F.linear(gathered, up)), down).redistribute(placements=[Shard(0)])

    forward, backward, out = costs(block, dx, du, dd, seed=spread(torch.ones_like(plain), Shard(0)))
    assert forward == {"all_gather": 1, "reduce_scatter": 1}
    assert backward == {"all_gather": 1, "reduce_scatter": 1}
    check(out, plain, [(dx, x), (du, up), (dd, down)])


@pytest.mark.ranks(4)
def test_projections_that_share_a_sequence_sharded_input():
    x = leaf(8, 8)
    weights = [leaf(4, 8, seed=s) for s in (1, 2, 3)]

    def project(x, weights):
        x = x.view(8, 8).to(torch.float64)
        q, k, v = (F.linear(x, w) for w in weights)
        return (q * k * v).sum()

    plain = project(x, weights)
    plain.backward()
    dx, dws = spread(x, Shard(0)), [spread(w, Shard(0)) for w in weights]
    forward, backward, out = costs(
        lambda x, *ws: project(x.redistribute(placements=[R], grad_placements=[P]), ws), dx, *dws
    )
    assert forward == {"all_gather": 1}
    assert backward == {"reduce_scatter": 1}
    check(out, plain, [(dx, x), *zip(dws, weights, strict=True)])


@pytest.mark.ranks(4)
def test_vocab_parallel_embedding_into_a_sequence_shard():
    ids, table = torch.tensor([1, 9, 3, 3, 0, 7, 2, 5]), leaf(10, 6)
    plain = F.embedding(ids, table)
    plain.backward(torch.ones_like(plain))
    dt, dids = spread(table, Shard(0)), spread(ids, R)
    forward, backward, out = costs(
        lambda t: F.embedding(dids, t).redistribute(placements=[Shard(0)]),
        dt,
        seed=spread(torch.ones_like(plain), Shard(0)),
    )
    assert forward == {"reduce_scatter": 1}
    assert backward == {"all_gather": 1}
    check(out, plain, [(dt, table)])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocab_parallel_cross_entropy(smoothing):
    logits, target = leaf(6, 10), torch.tensor([1, -100, 3, 9, 0, 7])
    plain = F.cross_entropy(logits, target, label_smoothing=smoothing)
    plain.backward()
    dl, dt = spread(logits, Shard(1)), spread(target, R)
    forward, backward, out = costs(lambda x: F.cross_entropy(x, dt, label_smoothing=smoothing), dl)
    assert forward == {"all_reduce": 2}
    assert backward == {}
    check(out, plain, [(dl, logits)])


@pytest.mark.ranks(4)
def test_a_data_parallel_mean_costs_nothing_and_each_parameter_one_reduction():
    x, w, b = leaf(10, 6), leaf(3, 6, seed=1), leaf(3, seed=2)  # ten rows on four ranks: uneven
    plain = F.linear(x, w, b).pow(2).mean()
    plain.backward()
    dx, dw, db = spread(x, Shard(0)), spread(w, R), spread(b, R)
    forward, backward, out = costs(lambda x, w, b: F.linear(x, w, b).pow(2).mean(), dx, dw, db)
    assert forward == {}
    assert backward == {"all_reduce": 2}
    check(out, plain, [(dx, x), (dw, w), (db, b)])


@pytest.mark.ranks(4)
def test_a_data_parallel_loss_with_ignored_targets_costs_one_scalar():
    x, w = leaf(10, 6), leaf(5, 6, seed=1)
    target = torch.tensor([0, -100, -100, 4, 1, 2, -100, -100, -100, -100])  # the last rank has none
    plain = F.cross_entropy(F.linear(x, w), target)
    plain.backward()
    dx, dw, dt = spread(x, Shard(0)), spread(w, R), spread(target, Shard(0))
    forward, backward, out = costs(lambda x, w: F.cross_entropy(F.linear(x, w), dt), dx, dw)
    assert forward == {"all_reduce": 1}
    assert backward == {"all_reduce": 1}
    check(out, plain, [(dx, x), (dw, w)])


@pytest.mark.ranks(4)
def test_norm_weights_on_a_sequence_shard_cost_at_most_one_reduction_each():
    x, w, b = leaf(8, 6), leaf(6, seed=1), leaf(6, seed=2)
    plain = F.layer_norm(x, (6,), w, b).pow(2).sum()
    plain.backward()
    dx, dw, db = spread(x, Shard(0)), spread(w, R), spread(b, R)
    forward, backward, out = costs(lambda x, w, b: F.layer_norm(x, (6,), w, b).pow(2).sum(), dx, dw, db)
    assert forward == {}
    assert backward == {"all_reduce": 2}
    check(out, plain, [(dx, x), (dw, w), (db, b)])


@pytest.mark.ranks(4)
def test_a_pending_sum_used_by_many_operators_is_reduced_once():
    x, w = leaf(6, 8), leaf(5, 8, seed=1)

    def use(x, w):
        h = F.linear(x, w)
        return (h.relu() + h.sigmoid() * h.tanh() + h.exp()).sum()

    plain = use(x, w)
    plain.backward()
    dx, dw = spread(x, Shard(1)), spread(w, Shard(1))
    forward, backward, out = costs(use, dx, dw)
    assert forward == {"all_reduce": 1}
    assert backward == {}
    check(out, plain, [(dx, x), (dw, w)])
