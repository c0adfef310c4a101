"""``redistribute(forward_dtype=, backward_dtype=)`` is as of PyTorch's DTensor; ``wire_dtype`` is ours."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import DeviceMesh

import hyper_parallel as ours
from hyper_parallel import CommTrace, Partial, Replicate, Shard
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make

LOW, HIGH = torch.bfloat16, torch.float64
PAIRS = [(LOW, None), (None, LOW), (LOW, LOW), (LOW, HIGH), (HIGH, LOW)]
THEIRS = {
    Shard(0): theirs.Shard(0),
    Shard(1): theirs.Shard(1),
    Replicate(): theirs.Replicate(),
    Partial(): theirs.Partial(),
}


@cache
def two_ranks():
    """Kept: torch remembers the groups of meshes that it has seen."""
    return DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("tp",))


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def piece(value, placement, rank):
    """This rank's piece of a value on two ranks; a pending sum has a term of half of it each."""
    if placement.is_shard():
        return value.tensor_split([-(-value.shape[placement.dim] // 2)], placement.dim)[rank].clone()
    return value / 2 if placement.is_partial() else value.clone()


def redistributed(lib, shape, source, target, **dtypes):
    """Result, gradient, and its gradient with respect to the incoming one, as one of the libraries computes them."""
    mesh, rank = two_ranks(), dist.get_rank()
    stride = torch.empty(shape).stride()

    def laid_out(local, placement):
        return lib.DTensor.from_local(local, mesh, [placement], shape=torch.Size(shape), stride=stride)

    x = piece(drawn(shape, 0), source, rank).requires_grad_()
    out = laid_out(x, source).redistribute(placements=[target], **dtypes)
    assert out.dtype == out.to_local().dtype
    sent_back = piece(drawn(shape, 1).to(out.dtype), target, rank).requires_grad_()
    (grad,) = torch.autograd.grad(out, x, laid_out(sent_back, target), create_graph=True)
    (second,) = torch.autograd.grad(grad, sent_back, drawn(grad.shape, 2))
    return out.to_local().detach(), grad.detach(), second


@pytest.mark.ranks(2)
@pytest.mark.parametrize("target", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("source", [Shard(0), Replicate(), Partial()], ids=str)
def test_values_and_gradients_are_those_of_torch(source, target):
    for forward, backward in PAIRS:
        for async_op in (False, True):
            given = {"forward_dtype": forward, "backward_dtype": backward, "async_op": async_op}
            found = redistributed(ours, (5, 3), source, target, **given)
            wanted = redistributed(theirs, (5, 3), THEIRS[source], THEIRS[target], **given)
            names = ["value", "gradient", "second derivative"]
            if source == Partial():  # of a term: what PyTorch takes for whole on each rank is a term for us
                names.pop()
            for name, mine, torchs in zip(names, found, wanted, strict=False):
                assert mine.dtype is torchs.dtype, (name, given)
                assert torch.equal(mine, torchs), (name, given)


@pytest.mark.ranks(4)
def test_the_collectives_run_in_these_dtypes():
    x = make(drawn((8, 4), 0), mesh_of((4,)), [Shard(0)], requires_grad=True)
    with CommTrace() as trace:
        y = x.redistribute(
            placements=[Replicate()], grad_placements=[Partial()], forward_dtype=LOW, backward_dtype=HIGH
        )
        y.backward(make(torch.ones(8, 4, dtype=LOW), mesh_of((4,)), [Partial()]))
    assert [(e.op, e.nbytes) for e in trace.events] == [("all_gather", 2 * 32), ("reduce_scatter", 8 * 32)]
    assert (y.dtype, x.grad.dtype) == (LOW, torch.float32)


@pytest.mark.ranks(4)
def test_a_result_in_another_dtype_is_used_as_any_other():
    value = drawn((6, 4), 0)
    x = make(value, mesh_of((4,)), [Shard(0)], requires_grad=True)
    weight = drawn((4, 3), 1).to(LOW)
    y = x.redistribute(placements=[Replicate()], forward_dtype=LOW)
    w = make(weight, mesh_of((4,)), [Shard(1)], requires_grad=True)
    (y @ w).float().square().sum().backward()
    single, single_w = value.clone().requires_grad_(), weight.clone().requires_grad_()
    (single.to(LOW) @ single_w).float().square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), single.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(w.grad.full_tensor(), single_w.grad, rtol=2e-2, atol=2e-2)


# -- the dtype on the wire alone ----------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(5, 3), (2, 3)], ids=str)
def test_the_wire_rounds_values_and_leaves_dtype_and_gradient(shape):
    value, weight = drawn(shape, 0), drawn(shape, 1)
    x = make(value, mesh_of((4,)), [Shard(0)], requires_grad=True)
    y = x.redistribute(placements=[Replicate()], wire_dtype=LOW)
    assert torch.equal(y.to_local(), value.to(LOW).float())
    y.backward(make(weight, mesh_of((4,)), [Replicate()]))
    assert torch.equal(x.grad.full_tensor(), weight)


@pytest.mark.ranks(4)
def test_the_wire_rounds_nothing_where_nothing_is_sent():
    value = drawn((5, 3), 0)
    x = make(value, mesh_of((4,)), [Replicate()])
    for target in (Shard(0), Replicate(), Partial()):
        assert torch.equal(x.redistribute(placements=[target], wire_dtype=LOW).full_tensor(), value)


@pytest.mark.ranks(4)
def test_wire_and_result_may_both_differ():
    value = drawn((5, 3), 0)
    x = make(value, mesh_of((4,)), [Shard(0)])
    with CommTrace() as trace:
        y = x.redistribute(placements=[Replicate()], forward_dtype=HIGH, wire_dtype=LOW)
    assert [e.nbytes for e in trace.events] == [2 * 4 * 2 * 3]
    assert torch.equal(y.to_local(), value.to(LOW).to(HIGH))


@pytest.mark.ranks(4)
def test_dtypes_that_are_the_tensors_own_change_nothing():
    x = make(drawn((5, 3), 0), mesh_of((4,)), [Shard(0)], requires_grad=True)
    own = dict.fromkeys(("forward_dtype", "backward_dtype", "wire_dtype"), torch.float32)
    assert x.redistribute(placements=[Shard(0)], **own) is x
