"""Dispatch modes of users (selective checkpointing, counters of operations) see the operators of the local tensors."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_parallel import Shard, distribute_tensor
from hyper_parallel.testing.placing import mesh_of


class Shapes(TorchDispatchMode):
    """Shapes of what matrix products give."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in str(func):
            self.seen.append(tuple(out.shape))
        return out


def product(x, weight):
    return F.linear(x, weight).sin()


@pytest.mark.ranks(2)
def test_what_is_asked_of_meta_tensors_is_not_seen():
    mesh = mesh_of((2,))
    x = distribute_tensor(torch.ones(2, 3, 7), mesh, [Shard(1)])  # one position on rank 1: strides are asked for
    with Shapes() as shapes:
        F.linear(x, distribute_tensor(torch.ones(5, 7), mesh))
    assert shapes.seen == [(2 * (2 - mesh.get_coordinate()[0]), 5)]


@pytest.mark.ranks(2)
def test_selective_checkpointing_of_the_first_call():
    mesh = mesh_of((2,))
    whole = [torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)]
    weight = whole[1].requires_grad_()
    x = distribute_tensor(whole[0], mesh, [Shard(1)])

    def keep_products(context, func, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "mm" in str(func) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    spread = distribute_tensor(weight.detach(), mesh).requires_grad_()
    checkpoint(product, x, spread, use_reentrant=False, context_fn=contexts).sum().backward()
    product(whole[0], weight).sum().backward()
    torch.testing.assert_close(spread.grad.full_tensor(), weight.grad)
