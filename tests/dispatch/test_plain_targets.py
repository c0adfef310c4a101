"""In-place operators on plain tensors with DTensors: what the target cannot hold leaves it as it was."""

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, implicit_replication, init_device_mesh


def make(placement, varying=False):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    grads = [Partial()] if varying else None
    return DTensor.from_local(torch.tensor([2.0]), mesh, [placement], grad_placements=grads).requires_grad_()


@pytest.mark.ranks(2)
def test_augmented_assignment_falls_back_to_a_new_tensor():
    """`loss += coefficient * auxiliary_loss` of mixtures: added once, and the gradient is right."""
    term = make(Replicate(), varying=True)
    start = torch.tensor([1.0], requires_grad=True)
    with implicit_replication():
        loss = start * 1
        before = loss
        loss += 0.5 * term
    assert before.tolist() == [1.0]
    assert isinstance(loss, DTensor)
    assert loss.full_tensor().tolist() == [2.0]
    loss.sum().backward()
    assert start.grad.tolist() == [1.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Partial(), Replicate()], ids=str)
def test_a_call_that_is_refused_writes_nothing(placement):
    term = make(placement, varying=placement == Replicate())
    target = torch.zeros(2 if placement == Shard(0) else 1)
    with implicit_replication():
        try:
            target.add_(term)
        except (TypeError, ValueError):
            assert not target.any()
        else:  # a sum that is due was reduced first
            assert placement == Partial()
            assert target.tolist() == [4.0]


@pytest.mark.ranks(2)
def test_what_is_equal_on_all_ranks_is_written():
    target = torch.ones(1)
    with torch.no_grad(), implicit_replication():
        assert target.mul_(make(Replicate())) is target
    assert target.tolist() == [2.0]
