"""Second derivatives on uneven and empty shards: those of one device, and every rank takes part in every collective."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Partial, Replicate, Shard, redistribute_policy
from hyper_parallel.testing import make, mesh_of

R, P = Replicate(), Partial()
OPERATORS = {
    "exp": lambda x, y: x.exp(),
    "mul": lambda x, y: x * y,
    "silu": lambda x, y: F.silu(x) * y,
    "where": lambda x, y: torch.where(x > 0, x * y, y),
    "transpose": lambda x, y: x.t().exp(),
    "cat": lambda x, y: torch.cat([x, y]) ** 2,
    "matmul": lambda x, y: x @ y.t(),
    "linear": lambda x, y: F.linear(x, y) ** 2,
    "sum": lambda x, y: x.sum(0) ** 2,
    "mean": lambda x, y: x.mean(1) ** 2,
    "cumsum": lambda x, y: x.cumsum(0) ** 2,
    "norm": lambda x, y: (x * y).norm() ** 3,
    "softmax": lambda x, y: torch.softmax(x, 1) * y,
    "log_softmax": lambda x, y: torch.log_softmax(x, 0),
    "logsumexp": lambda x, y: x.logsumexp(1),
}
SHAPES = [(1, 3), (3, 1), (2, 3), (3, 5), (1, 1)]
LAYOUTS = {
    (4,): [[R], [Shard(0)], [Shard(1)], [P]],
    (2, 2): [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), P], [R, Shard(1)]],
}


def values(shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def second_derivatives(function, x, y):
    out = function(x, y)
    first = torch.autograd.grad((out * out).sum(), (x, y), create_graph=True, allow_unused=True)
    size = sum((g * g).sum() for g in first if g is not None)
    return torch.autograd.grad(size, (x, y), allow_unused=True)


def compare(name, mesh_shape):
    function, mesh = OPERATORS[name], mesh_of(mesh_shape)
    for shape, of_x, of_y in itertools.product(SHAPES, LAYOUTS[mesh_shape], LAYOUTS[mesh_shape]):
        a, b = values(shape, 0), values(shape, 1)
        with redistribute_policy("auto"):
            try:
                found = second_derivatives(
                    function, make(a, mesh, of_x, requires_grad=True), make(b, mesh, of_y, requires_grad=True)
                )
            except NotImplementedError:  # said by every rank
                continue
        wanted = second_derivatives(function, a.requires_grad_(), b.requires_grad_())
        for mine, right in zip(found, wanted, strict=True):
            right = torch.zeros(shape, dtype=torch.float64) if right is None else right
            whole = torch.zeros_like(right) if mine is None else mine.full_tensor()
            torch.testing.assert_close(whole, right, msg=lambda m, s=shape, x=of_x, y=of_y: f"{s} {x} {y}: {m}")


@pytest.mark.parametrize("mesh_shape", LAYOUTS, ids=["4", "2x2"])
@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_equal_those_of_one_device(ranks, name, mesh_shape):
    ranks(4, compare, name, mesh_shape)
