"""What a DTensor remembers (reduced and varying forms, where it was gathered from) is used only while it is current."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, redistribute_policy

R, P = Replicate(), Partial()


def mesh4():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def partial_ones():
    """A pending sum of ones, global value 4."""
    return DTensor.from_local(torch.ones(3, dtype=torch.float64), mesh4(), [P])


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def spread(tensor, placement):
    return distribute_tensor(tensor, mesh4(), [placement], src_data_rank=None)


@pytest.mark.ranks(4)
def test_a_write_to_the_source_of_a_gathered_tensor_ends_the_fusion():
    a, w = leaf(4, 4), leaf(4, 4).detach()

    def f(a, w, gather):
        x = a * 1
        y = gather(x)
        x.mul_(2)
        return (y @ w).sum()

    f(a, w, lambda x: x * 1).backward()
    da = spread(a, Shard(0))
    f(da, spread(w, Shard(1)), lambda x: x.redistribute(placements=[R])).backward()
    torch.testing.assert_close(da.grad.full_tensor(), a.grad)


@pytest.mark.ranks(4)
def test_hooks_and_retained_gradients_of_a_gathered_tensor_see_its_gradient():
    a, w = leaf(4, 4), leaf(4, 8).detach()
    y = a * 1
    y.retain_grad()
    (y @ w).sum().backward()
    da, dw = spread(a, Shard(0)), spread(w, Shard(1))
    seen = []
    dy = da.redistribute(placements=[R])
    dy.retain_grad()
    dy.register_hook(lambda grad: seen.append(grad.full_tensor()))
    (dy @ dw).sum().backward()
    torch.testing.assert_close(dy.grad.full_tensor(), y.grad)
    torch.testing.assert_close(seen[0], y.grad)
    torch.testing.assert_close(da.grad.full_tensor(), a.grad)


@pytest.mark.ranks(4)
def test_a_reduced_form_made_before_requires_grad_is_not_used_after():
    x = partial_ones()
    x.relu()
    x.requires_grad_()
    x.relu().sum().backward()
    assert x.grad.full_tensor().tolist() == [1.0] * 3


@pytest.mark.ranks(4)
def test_writes_through_data_are_seen():
    x = partial_ones()
    assert x.relu().tolist() == [4.0] * 3
    x.data.zero_()
    assert x.relu().tolist() == [0.0] * 3
    x = partial_ones()
    x.relu()
    x.data.detach().zero_()
    assert x.reduce_partial().tolist() == [0.0] * 3
    x = partial_ones()
    x.relu()
    x.data = partial_ones() + partial_ones()
    assert x.relu().tolist() == [8.0] * 3


@pytest.mark.ranks(4, timeout=60)
def test_a_write_that_only_one_rank_carries_out_is_seen_by_all():
    x = spread(torch.arange(8.0), Shard(0))
    with redistribute_policy("auto"):
        assert x.flip(0).full_tensor().tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
        x[0] = 5.0
        assert x.flip(0).full_tensor().tolist() == [7, 6, 5, 4, 3, 2, 1, 5]


@pytest.mark.ranks(4)
def test_inference_mode():
    with torch.inference_mode():
        x = partial_ones()
        assert x.relu().tolist() == [4.0] * 3
        assert (x.relu() + x).tolist() == [8.0] * 3


@pytest.mark.ranks(4)
def test_backward_from_a_pending_average_equals_backward_after_reducing_it():
    for finish in (lambda x: x, lambda x: x.reduce_partial(), lambda x: x * 2):
        local = torch.ones((), dtype=torch.float64, requires_grad=True)
        x = DTensor.from_local(local, mesh4(), [Partial("avg")])
        finish(x).backward()
        assert local.grad.item() == (0.5 if finish(x).detach().item() == 2 else 0.25)
