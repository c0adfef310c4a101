"""Writes between a call and its backward: the ranks allow what one device allows, and the gradient is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Replicate, Shard, redistribute_policy
from hyper_parallel.testing import make, mesh_of

CLASSES = torch.tensor([0, 5, 2, 3])
CHANCES = torch.softmax(torch.arange(24.0, dtype=torch.float64).view(4, 6) % 5, -1)
PLACES = torch.tensor([[0, 3], [3, 1], [2, 2], [1, 0]])
WEIGHT = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
MASK = torch.arange(24).view(4, 6) % 3 == 0


def output(function):
    """What the function gives (the first of several results) is written."""

    def run(x, given):
        result = function(x, given)
        result = result[0] if isinstance(result, tuple) else result
        result.mul_(2)
        return result

    return run


def source(function):
    """What the function was given is written after it."""

    def run(x, given):
        hidden = x * 1
        result = function(hidden, given)
        hidden.zero_()
        return result

    return run


WRITES = {
    "topk": output(lambda x, d: tuple(x.topk(2, -1))),
    "sort": output(lambda x, d: tuple(x.sort(-1))),
    "kthvalue": output(lambda x, d: tuple(x.kthvalue(2, -1))),
    "max": output(lambda x, d: tuple(x.max(-1))),
    "cummax": output(lambda x, d: tuple(x.cummax(-1))),
    "var_mean": output(lambda x, d: torch.var_mean(x, -1)[::-1]),
    "layer_norm": output(lambda x, d: F.layer_norm(x, (6,))),
    "layer_norm with weight": output(lambda x, d: F.layer_norm(x, (6,), d(WEIGHT), d(WEIGHT))),
    "rms_norm": output(lambda x, d: F.rms_norm(x, (6,))),
    "rms_norm with weight": output(lambda x, d: F.rms_norm(x, (6,), d(WEIGHT))),
    "group_norm": output(lambda x, d: F.group_norm(x.view(4, 6, 1), 3)),
    "softmax": source(lambda x, d: F.softmax(x, -1)),
    "log_softmax": source(lambda x, d: F.log_softmax(x, -1)),
    "cross_entropy": source(lambda x, d: F.cross_entropy(x, d(CLASSES))),
    "cross_entropy of each": source(lambda x, d: F.cross_entropy(x, d(CLASSES), reduction="none")),
    "cross_entropy, smoothed": source(lambda x, d: F.cross_entropy(x, d(CLASSES), label_smoothing=0.1)),
    "cross_entropy of chances": source(lambda x, d: F.cross_entropy(x, d(CHANCES))),
    "cross_entropy, the loss": output(lambda x, d: F.cross_entropy(x, d(CLASSES))),
    "cumsum": output(lambda x, d: x.cumsum(-1)),
    "gather": output(lambda x, d: x.gather(-1, d(PLACES))),
    "index_add": output(lambda x, d: x.index_add(-1, d(PLACES[0]), d(torch.ones(4, 2, dtype=x.dtype)))),
    "scatter": output(lambda x, d: x.scatter(-1, d(PLACES), 0.0)),
    "embedding": output(lambda x, d: F.embedding(d(PLACES), x)),
    "masked": output(lambda x, d: x[d(MASK)]),
    "flip": output(lambda x, d: x.flip(-1)),
    "cat": output(lambda x, d: torch.cat([x, x], -1)),
    "pad": output(lambda x, d: F.pad(x, (1, 1))),
    "avg_pool1d": output(lambda x, d: F.avg_pool1d(x.view(4, 1, 6), 2)),
    "max_pool1d": output(lambda x, d: F.max_pool1d(x.view(4, 1, 6), 2)),
    "linear": output(lambda x, d: F.linear(x, d(torch.ones(3, 6, dtype=x.dtype)))),
}


@pytest.mark.parametrize("world", [2, 4])
def test_writes_are_as_on_one_device(ranks, world):
    """On four ranks the last one has none of the six columns."""
    assert ranks(world, wrong_writes, world, timeout=240) == [[]] * world


def wrong_writes(world):
    """What of the above is wrong on this rank."""
    value = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mesh, found = mesh_of((world,)), []
    for name, write in WRITES.items():
        plain = value.clone().requires_grad_()
        want = write(plain, lambda t: t)
        seed = torch.rand(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(4))
        want.backward(seed)
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = make(value, mesh, [placement], requires_grad=True)
            try:
                with redistribute_policy("auto"):
                    got = write(x, lambda t: make(t, mesh, [Replicate()]))
                    got.backward(make(seed, mesh, [Replicate()]))
                right = torch.allclose(x.grad.full_tensor(), plain.grad)
                right &= torch.allclose(got.detach().full_tensor(), want.detach())
            except RuntimeError as error:
                right, name = False, f"{name}: {error}"
            if not right:
                found.append(f"{name}, {placement}")
    return found
