"""Gradients equal those of one device for any layout: the traps that gradient types exist for, one test each.

Each test runs the same function on plain tensors and on DTensors over 4 ranks (2x2), and compares values, gradients
and, where it matters, which collectives ran.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    CommTrace,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    redistribute_policy,
)

R, P = Replicate(), Partial()


def S(dim):
    return Shard(dim)


def mesh2x2():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def spread(tensor, *placements):
    return distribute_tensor(tensor, mesh2x2(), placements, src_data_rank=None)


def check_gradients(pairs):
    for distributed, plain in pairs:
        assert distributed.grad.placements == distributed.placements
        torch.testing.assert_close(distributed.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
def test_bias_of_a_row_parallel_linear_is_added_once_and_gets_one_gradient():
    x, w, b = leaf(6, 8), leaf(5, 8, seed=1), leaf(5, seed=2)
    out = F.linear(x, w, b)
    out.pow(2).sum().backward()
    dx, dw, db = spread(x, R, S(1)), spread(w, R, S(1)), spread(b, R, R)
    with CommTrace() as trace:
        result = F.linear(dx, dw, db)
        assert result.placements == (R, P)
        result = result.reduce_partial()
        result.backward(2 * result.detach())
    torch.testing.assert_close(result.full_tensor(), out.detach())
    check_gradients([(dx, x), (dw, w), (db, b)])
    assert trace.counts == {"all_reduce": 1}


@pytest.mark.ranks(4)
def test_type_as_a_sharded_tensor_does_not_make_the_gradient_partial():
    x, y = leaf(6, 4), leaf(6, 4, seed=1)
    (x.float().type_as(y) * 2).sum().backward()
    dx, dy = spread(x, R, R), spread(y, S(0), R)
    with CommTrace() as trace:
        (dx.float().type_as(dy) * 2).sum().backward()
    check_gradients([(dx, x)])
    assert not trace.events


@pytest.mark.ranks(4)
def test_reading_the_loss_before_backward_keeps_the_graph():
    x, w = leaf(6, 8), leaf(5, 8, seed=1)
    F.linear(x, w).pow(2).sum().backward()
    dx, dw = spread(x, S(0), S(1)), spread(w, R, S(1))
    loss = F.linear(dx, dw).pow(2).sum()
    value = loss.item()
    loss.backward()
    assert value == pytest.approx(F.linear(x, w).pow(2).sum().item())
    check_gradients([(dx, x), (dw, w)])


@pytest.mark.ranks(4)
def test_in_place_after_a_remembered_reduction_uses_the_new_value():
    x, w = leaf(6, 8), leaf(5, 8, seed=1)
    dx, dw = spread(x.detach(), R, S(1)), spread(w.detach(), R, S(1))
    product, plain = F.linear(dx, dw), F.linear(x, w).detach()
    torch.testing.assert_close(product.relu().full_tensor(), plain.relu())
    product.mul_(-1)
    torch.testing.assert_close(product.relu().full_tensor(), (-plain).relu())


@pytest.mark.ranks(4)
def test_a_partial_used_by_several_operators_is_reduced_once():
    x, w = leaf(6, 8), leaf(5, 8, seed=1)
    dx, dw = spread(x, R, S(1)), spread(w, R, S(1))
    h = F.linear(x, w)
    (h.relu() + h.sigmoid() * h.tanh()).sum().backward()
    with CommTrace() as trace:
        h = F.linear(dx, dw)
        loss = (h.relu() + h.sigmoid() * h.tanh()).sum()
    assert trace.counts == {"all_reduce": 1}
    loss.backward()
    check_gradients([(dx, x), (dw, w)])


@pytest.mark.ranks(4)
def test_index_add_of_sharded_sources_into_a_replicated_zeros_like():
    x, scores = leaf(6, 4), leaf(6, 1, seed=1)
    index = torch.tensor([0, 2, 2, 5, 1, 0])

    def moe(x, scores, index):
        out = torch.zeros_like(x)
        picked = x.index_select(0, index) * scores
        out.index_add_(0, index, picked)
        return (out * out).sum()

    plain = moe(x, scores, index)
    plain.backward()
    for placements in ([R, R], [S(1), R], [R, S(1)]):
        dx, ds = spread(x, *placements), spread(scores, R, R)
        loss = moe(dx, ds, spread(index, R, R))
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), plain.detach())
        check_gradients([(dx, x), (ds, scores)])


@pytest.mark.ranks(4)
def test_a_replicated_target_turns_varying_when_varying_terms_are_added_in_place():
    w, v = leaf(4, 6), leaf(4, seed=1)
    x = leaf(3, 6, seed=2)

    def f(x, w, v):
        total = torch.zeros_like(v)
        total.add_(F.linear(x, w).sum(0))  # sharded features on tp
        return (total * v).sum()

    f(x, w, v).backward()
    dx, dw, dv = spread(x, R, R), spread(w, R, R), spread(v, R, R)
    varying = dx.redistribute(placements=[R, R], grad_placements=[R, P])
    loss = f(varying, dw, dv)
    loss.backward()
    check_gradients([(dw, w), (dv, v), (dx, x)])


@pytest.mark.ranks(4)
def test_a_varying_tensor_leaves_by_to_local_redistribute_and_backward():
    x = leaf(4, 6)
    (x * 3).sum().backward()
    dx = spread(x, R, R)
    varying = dx.redistribute(placements=[R, R], grad_placements=[R, P])
    assert varying.grad_placements == (R, P)
    # backward from a varying tensor converts it first: the seed counts once.
    (varying * 3).sum().backward()
    check_gradients([(dx, x)])
    dx.grad = None
    # to_local keeps the gradient type: each rank sends its own term.
    local = dx.redistribute(placements=[R, R], grad_placements=[R, P]).to_local()
    (local * (3 if dx.device_mesh.get_local_rank("tp") == 0 else 0)).sum().backward()
    check_gradients([(dx, x)])
    dx.grad = None
    # redistribute to a shard: pad, no communication; the terms are summed at the root.
    varying = dx.redistribute(placements=[R, R], grad_placements=[R, P])
    with CommTrace() as trace:
        (varying.redistribute(placements=[R, S(0)]) * 3).sum().backward()
    assert trace.counts == {"all_reduce": 1}
    check_gradients([(dx, x)])


@pytest.mark.ranks(4)
def test_operands_sharded_by_the_same_axes_in_another_order_are_not_combined():
    from hyper_parallel import Layout

    x = leaf(8, 3)
    layout = Layout.from_placements(mesh2x2(), [S(0), S(0)], ndim=2)
    other = Layout.from_placements(mesh2x2(), [S(0), S(0)], ndim=2, shard_order={0: ("tp", "dp")})
    assert layout is not other
    a = distribute_tensor(x, layout, src_data_rank=None)
    b = distribute_tensor(x, other, src_data_rank=None)
    with pytest.raises(ValueError, match="same order"):
        a + b
    from hyper_parallel import redistribute_policy

    with redistribute_policy("auto"):
        torch.testing.assert_close((a + b).full_tensor(), 2 * x.detach())


@pytest.mark.ranks(4)
def test_view_of_a_dim_over_two_axes_gives_each_axis_its_own_dim():
    x = leaf(8)
    (x.view(2, 4) * torch.arange(8.0).view(2, 4)).sum().backward()
    dx = spread(x, S(0), S(0))
    viewed = dx.view(2, 4)
    assert viewed.placements == (S(0), S(1))
    torch.testing.assert_close(viewed.full_tensor(), x.detach().view(2, 4))
    weights = spread(torch.arange(8.0, dtype=torch.float64).view(2, 4), S(0), S(1))
    (viewed * weights).sum().backward()
    check_gradients([(dx, x)])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placements", [(R, S(0)), (R, S(1)), (S(0), S(1)), (R, R)])
def test_second_derivatives_equal_one_device(placements):
    x, w = leaf(4, 6), leaf(4, 6, seed=1)

    def f(x, w):
        return (F.linear(x, w).tanh() * 2).sum()

    (g,) = torch.autograd.grad(f(x, w), x, create_graph=True)
    g.pow(2).sum().backward()
    dx, dw = spread(x, R, R), spread(w, *placements)
    loss = f(dx, dw)
    (dg,) = torch.autograd.grad(loss, dx, create_graph=True)
    torch.testing.assert_close(dg.full_tensor().detach(), g.detach())
    dg.pow(2).sum().backward()
    check_gradients([(dx, x), (dw, w)])


@pytest.mark.ranks(4)
def test_gather_then_view_and_cast_then_colwise_ends_in_one_reduce_scatter():
    x = leaf(2, 4, 6)
    weights = [leaf(8, 6, seed=s) for s in (1, 2, 3)]

    def f(x, weights):
        x = x.view(8, 6).to(torch.float64)
        return sum(F.linear(x, w).tanh().sum() for w in weights)

    f(x, weights).backward()
    dx = spread(x, R, S(1))
    sharded = [spread(w, R, S(0)) for w in weights]
    with CommTrace() as trace:
        gathered = dx.redistribute(placements=[R, R], grad_placements=[R, P])
        loss = f(gathered, sharded)
        loss.backward()
    assert trace.phase("forward") == {"all_gather": 1}
    assert trace.phase("backward") == {"reduce_scatter": 1}
    check_gradients([(dx, x), *zip(sharded, weights, strict=True)])


@pytest.mark.ranks(4)
def test_a_gathered_tensor_used_as_varying_fuses_into_one_reduce_scatter_without_being_asked():
    x, w1, w2 = leaf(4, 6), leaf(8, 6, seed=1), leaf(8, 6, seed=2)
    (F.linear(x, w1).tanh().sum() + F.linear(x, w2).sum()).backward()
    dx, d1, d2 = spread(x, R, S(0)), spread(w1, R, S(0)), spread(w2, R, S(0))
    with CommTrace() as trace:
        gathered = dx.redistribute(placements=[R, R])
        (F.linear(gathered, d1).tanh().sum() + F.linear(gathered, d2).sum()).backward()
    assert trace.phase("forward") == {"all_gather": 1}
    assert trace.phase("backward") == {"reduce_scatter": 1}
    check_gradients([(dx, x), (d1, w1), (d2, w2)])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_under_activation_checkpointing(reentrant):
    x, w1, w2 = leaf(4, 6), leaf(8, 6, seed=1), leaf(6, 8, seed=2)

    def block(x, w1, w2):
        return F.linear(F.silu(F.linear(x, w1)), w2) + x

    block(x, w1, w2).pow(2).sum().backward()
    dx, d1, d2 = spread(x, S(0), R), spread(w1, R, S(0)), spread(w2, R, S(1))
    checkpoint(block, dx, d1, d2, use_reentrant=reentrant).pow(2).sum().backward()
    check_gradients([(dx, x), (d1, w1), (d2, w2)])


@pytest.mark.ranks(4)
def test_no_gradients_no_conversion():
    x, w = leaf(4, 6), leaf(8, 6, seed=1)
    dx, dw = spread(x, R, R), spread(w, R, S(0))
    with torch.no_grad(), CommTrace() as trace:
        out = F.linear(dx, dw)
        assert out.grad_placements == (R, S(1))
    assert not trace.events
    assert isinstance(out, DTensor)


@pytest.mark.ranks(4)
def test_replicated_parameter_on_sharded_activations_costs_one_reduction_per_axis_group():
    x, scale = leaf(4, 6), leaf(6, seed=1)
    (x * scale).pow(2).sum().backward()
    dx, ds = spread(x, S(0), S(1)), spread(scale, R, R)
    with CommTrace() as trace:
        (dx * ds).pow(2).sum().backward()
    assert trace.phase("forward") == {}
    assert trace.phase("backward")["all_reduce"] <= 1  # tp slices the scale: its gradient is gathered there
    check_gradients([(dx, x), (ds, scale)])


@pytest.mark.ranks(4)
def test_writing_into_a_view_changes_the_tensor():
    x = leaf(4, 6)
    with torch.no_grad():
        d = spread(x.detach(), R, S(0))
        d.view(2, 2, 6)[:, 0].mul_(0)
        d.t().add_(1)
    plain = x.detach().clone()
    plain.view(2, 2, 6)[:, 0].mul_(0)
    plain.t().add_(1)
    torch.testing.assert_close(d.full_tensor(), plain)


@pytest.mark.ranks(4)
def test_a_tensor_on_the_whole_mesh_joins_an_operator_on_a_sub_mesh():
    mesh = mesh2x2()
    x, w = leaf(4, 6), leaf(8, 6, seed=1)
    # Each dp group has its own copy of the work: the gradient of w is the sum over the groups.
    (2 * F.linear(x, w).tanh().sum()).backward()
    dx = distribute_tensor(x, mesh["tp"], [R], src_data_rank=None)
    dw = spread(w, R, S(0))
    out = F.linear(dx, dw)
    assert out.device_mesh == mesh["tp"]
    assert out.placements == (S(1),)
    out.tanh().sum().backward()
    torch.testing.assert_close(dw.grad.full_tensor(), w.grad)
    torch.testing.assert_close(2 * dx.grad.full_tensor(), x.grad)
    with pytest.raises(ValueError, match=r"different meshes: tp=2, and input 1 on dp=2xtp=2(.|\n)*fully_shard"):
        F.linear(dx, spread(w, S(0), R))


@pytest.mark.ranks(4)
def test_a_partial_that_was_reduced_once_is_used_in_reduced_form_after():
    x, w, scale = leaf(6, 8), leaf(5, 8, seed=1), leaf(5, seed=2)

    def norm(h, scale):  # as transformers writes it
        return scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))

    norm(F.linear(x, w), scale).pow(2).sum().backward()
    dx, dw, ds = spread(x, R, S(1)), spread(w, R, S(1)), spread(scale, R, R)
    with CommTrace() as trace:
        out = norm(F.linear(dx, dw), ds)
    assert out.placements == (R, R)
    assert trace.counts == {"all_reduce": 1}
    out.pow(2).sum().backward()
    check_gradients([(dx, x), (dw, w), (ds, scale)])


@pytest.mark.ranks(4)
def test_calls_alike_whose_inputs_change_on_the_way_in_use_what_the_inputs_are_now():
    x, norm, scale = leaf(8, 6), leaf(6, seed=1), leaf(6, seed=2)
    dx, dn, ds = spread(x, S(0), R), spread(norm, R, R), spread(scale, R, R)
    for _ in range(3):  # the first call plans, the others find the plan
        results = []
        for a, n, b in ((x, norm, scale), (dx, dn, ds)):
            results.append(F.rms_norm(a, (6,), weight=n) * b)
            (results[-1] ** 2).sum().backward()
            with torch.no_grad():
                n.mul_(0.5)
                b.add_(1.0)
        torch.testing.assert_close(results[1].full_tensor(), results[0])
        check_gradients([(dx, x), (dn, norm), (ds, scale)])


@pytest.mark.ranks(4)
def test_a_view_that_had_to_be_redistributed_is_known_as_a_copy_each_time():
    x = spread(torch.arange(6.0).reshape(3, 2), S(0), R)
    for _ in range(3):
        with redistribute_policy("auto"):
            flat = x.view(6)
        torch.testing.assert_close(flat.full_tensor(), torch.arange(6.0))
        with pytest.raises(RuntimeError, match="redistributed copy"):
            x.add_(1.0)
        del flat


@pytest.mark.ranks(4)
def test_an_unused_scalar_of_a_reentrant_checkpoint_has_no_gradient():
    a, b = leaf(6), leaf(4, seed=1)
    (b * 3).sum().backward()
    da, db = spread(a, R, S(0)), spread(b, S(0), R)
    _, out = checkpoint(lambda a, b: (a.sum(), b * 3), da, db, use_reentrant=True)
    out.sum().backward()
    assert da.grad.full_tensor().tolist() == [0.0] * 6
    check_gradients([(db, b)])


@pytest.mark.ranks(4)
def test_a_second_derivative_that_is_not_there_raises():
    x = spread(leaf(4, 6), R, S(1))
    for function in (lambda x: F.layer_norm(x, (6,)), lambda x: F.rms_norm(x, (6,))):
        with pytest.raises(NotImplementedError, match="second derivative"):
            torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
