"""Random operators: for any layout, the numbers and the generator's state are those of one device."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import Layout, Partial, Replicate, Shard, manual_seed
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make

SEED = 7


def filled(name, *args):
    return lambda x: getattr(x.detach().clone(), name)(*args)


def initialised(name, *args):
    def run(x):
        x = x.detach().clone()
        with torch.no_grad():
            getattr(nn.init, name)(x, *args)
        return x

    return run


def checkpointed(x, *, use_reentrant):
    return checkpoint(lambda y: F.dropout(y, 0.4) * y.sin() * F.dropout(y, 0.2), x, use_reentrant=use_reentrant)


def parts_filled(x):
    x = x.detach().clone()
    x[1:4].normal_()
    x[:, 2].uniform_()
    return x


CASES = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of a transpose": lambda x: F.dropout(x.t(), 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "dropout of nothing": lambda x: F.dropout(x, 0.0) * 1,
    "no dropout": lambda x: F.dropout(x, 0.3, training=False) * 1,
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(-1), 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.unsqueeze(-1), 0.3, training=True),
    "checkpoint": functools.partial(checkpointed, use_reentrant=False),
    "reentrant checkpoint": functools.partial(checkpointed, use_reentrant=True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x.t()),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "bernoulli with p": lambda x: torch.bernoulli(x.detach(), 0.4),
    "bernoulli of what needs a gradient": lambda x: torch.bernoulli(x.sigmoid()),
    "poisson": lambda x: torch.poisson(x.exp()),
    "binomial": lambda x: torch.binomial(torch.full_like(x.detach(), 9.0), x.detach().sigmoid()),
    "normal": lambda x: torch.normal(x, x.exp()),
    "normal of a number": lambda x: torch.normal(2.0, x.exp()),
    "multinomial": lambda x: torch.multinomial(x.detach().exp(), 2) if not sharded(x, 1) else None,
    "multinomial with replacement": lambda x: (
        torch.multinomial(x.detach().exp(), 7, True) if not sharded(x, 1) else None
    ),
    "multinomial in another memory order": lambda x: (
        torch.multinomial(x.detach().t().exp(), 2) if not sharded(x, 0) else None
    ),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "no native_dropout": lambda x: torch.native_dropout(x, 0.3, False)[0],
    "normal_": filled("normal_", 1.0, 2.0),
    "normal_ of parts": parts_filled,
    "uniform_": filled("uniform_", -1.0, 2.0),
    "exponential_": filled("exponential_"),
    "random_": filled("random_", 0, 9),
    "bernoulli_": filled("bernoulli_", 0.4),
    "log_normal_": filled("log_normal_"),
    "init.uniform_": initialised("uniform_"),
    "init.normal_": initialised("normal_", 0.0, 2.0),
    "init.constant_": initialised("constant_", 2.0),
    "init.zeros_": initialised("zeros_"),
    "init.kaiming_uniform_": initialised("kaiming_uniform_", 5**0.5),
    "init.kaiming_normal_": initialised("kaiming_normal_"),
    "init.xavier_uniform_": initialised("xavier_uniform_"),
    "init.trunc_normal_": initialised("trunc_normal_", 0.0, 1.0, -0.5, 0.5),
}


def sharded(x, dim):
    return any(p == Shard(dim) for p in getattr(x, "placements", ()))


def layouts():
    one = [[Replicate()], [Shard(0)], [Shard(1)], [Partial()]]
    two = [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Partial()]]
    for shape, choices in (((4,), one), ((2, 2), two)):
        for placements in choices:
            yield Layout.from_placements(mesh_of(shape), placements, ndim=2)


def compare(name):
    function = CASES[name]
    value = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = value.clone().requires_grad_()
    manual_seed(SEED)
    want = function(plain)
    state = torch.get_rng_state()
    if want.requires_grad:
        want.backward(torch.ones_like(want))
    for layout in layouts():
        if layout.is_partial() and "checkpoint" in name:
            continue  # sin of a pending sum: another matter
        x = make(value, layout.mesh, layout).detach().requires_grad_()
        manual_seed(SEED)
        got = function(x)
        if got is None:
            continue
        assert torch.equal(torch.get_rng_state(), state), f"{layout}: the generator's state differs"
        assert torch.allclose(got.detach().full_tensor(), want), f"{layout}"
        assert got.requires_grad == want.requires_grad, f"{layout}"
        if want.requires_grad:
            got.backward(torch.ones_like(want))
            assert torch.allclose(x.grad.full_tensor(), plain.grad), f"{layout}: gradient"


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(ranks, name):
    ranks(4, compare, name)


def drawn_like(x):
    manual_seed(SEED)
    return torch.rand_like(x), torch.randint_like(x, 2, 9), torch.bernoulli(x.sigmoid()), torch.bernoulli(x, 0.3)


class TestMemoryOrder(OpConformance):
    op = drawn_like
    meshes = ((4,), (2, 2))
    max_layouts = 12
    samples = (sample(tensor(5, 6, grad=False)),)


@pytest.mark.ranks(4)
def test_parameters_may_be_written_to_before_the_backward():
    x = make(torch.ones(5, 6), mesh_of((4,)), [Shard(0)], requires_grad=True)
    mean = x * 2
    drawn = torch.normal(mean, 1.0)
    mean.detach().zero_()
    drawn.sum().backward()
    assert not x.grad.full_tensor().any()


@pytest.mark.ranks(4)
def test_slopes_of_rrelu_are_the_same_for_any_layout():
    """Not those of one device, whose kernels draw for negative elements only."""
    value = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for layout in layouts():
        x = make(value, layout.mesh, layout).detach().requires_grad_()
        manual_seed(SEED)
        out = F.rrelu(x, 0.2, 0.4, training=True)
        out.backward(torch.ones_like(out))
        slopes = x.grad.full_tensor()
        torch.testing.assert_close(out.detach().full_tensor(), value * slopes)
        results.append(slopes)
        assert torch.equal(slopes, results[0])
    assert bool((results[0][value > 0] == 1).all())
    negative = results[0][value < 0]
    assert 0.2 <= float(negative.min()) < float(negative.max()) <= 0.4
    x = make(value, mesh_of((4,)), [Shard(0)])
    torch.testing.assert_close(F.rrelu(x, inplace=True).full_tensor(), F.rrelu(value))


@pytest.mark.ranks(4)
def test_ranks_with_different_seeds_are_told():
    manual_seed(torch.distributed.get_rank())
    x = make(torch.zeros(5, 6), mesh_of((4,)), [Shard(0)])
    with pytest.raises(RuntimeError, match="manual_seed"):
        F.dropout(x, 0.5)
    manual_seed(SEED)
    F.dropout(x, 0.5)


@pytest.mark.ranks(4)
def test_a_parameter_may_be_initialised_with_gradients_on():
    parameter = make(torch.zeros(5, 6), mesh_of((4,)), [Shard(0)], requires_grad=True)
    for name in ("kaiming_uniform_", "uniform_", "normal_", "xavier_normal_", "ones_"):
        assert getattr(nn.init, name)(parameter) is parameter
        assert parameter.is_leaf
