"""What the rules communicate; and what the conformance kit cannot ask: ties, low precision, second derivatives."""

import math

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.comm.trace import CommTrace


def mesh_2d():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def spread(value, placements, grad=True):
    """A leaf on the 2x2 mesh."""
    made = distribute_tensor(value, mesh_2d(), placements)
    return made.requires_grad_() if grad and value.is_floating_point() else made


def count(function, *tensors):
    """Collectives of the forward and of the backward."""
    with CommTrace() as forward:
        result = function(*tensors)
    outputs = [o for o in (result if isinstance(result, tuple) else (result,)) if o.requires_grad]
    with CommTrace() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(o.detach()) for o in outputs])
    return dict(forward.counts), dict(backward.counts)


ONE, TWO, NONE = {"all_reduce": 1}, {"all_reduce": 2}, {}
ROWS, COLUMNS, BOTH = [Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(1)]
UNARY = {
    "sum": (lambda x: x.sum(1), COLUMNS, NONE, NONE),
    "mean": (lambda x: x.mean(), BOTH, NONE, NONE),
    "amax": (lambda x: x.amax(1), COLUMNS, ONE, ONE),
    "max": (lambda x: x.max(1), COLUMNS, TWO, NONE),
    "argmax": (lambda x: x.max(1).values + x.argmax(1), ROWS, NONE, NONE),
    "prod": (lambda x: x.prod(1), COLUMNS, {"all_gather": 1}, NONE),
    "var": (lambda x: x.var(1), COLUMNS, TWO, ONE),
    "norm": (lambda x: torch.linalg.vector_norm(x), BOTH, ONE, NONE),
    "logsumexp": (lambda x: x.logsumexp(1), COLUMNS, TWO, NONE),
    "softmax": (lambda x: x.softmax(1), BOTH, TWO, ONE),
    "log_softmax": (lambda x: x.log_softmax(1), COLUMNS, TWO, ONE),
    "softmax of rows": (lambda x: x.softmax(1), ROWS, NONE, NONE),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), BOTH, TWO, ONE),
    "rms_norm": (lambda x: F.rms_norm(x, (6,)), COLUMNS, ONE, ONE),
    "cumsum": (lambda x: x.cumsum(1), COLUMNS, {"all_gather": 1}, {"reduce_scatter": 1}),
    "mse": (lambda x: F.mse_loss(x, x.detach() * 2), BOTH, NONE, NONE),
}


def unary(name):
    function, placements, _, _ = UNARY[name]
    return count(function, spread(torch.randn(5, 6), placements))


@pytest.mark.parametrize("name", UNARY)
def test_reductions(ranks, name):
    _, _, forward, backward = UNARY[name]
    assert ranks(4, unary, name) == [(forward, backward)] * 4


def one_argmax():
    x = spread(torch.randn(5, 6), BOTH, grad=False)
    with CommTrace() as trace:
        x.argmax()
    return dict(trace.counts)


def test_argmax_costs_two_all_reduces(ranks):
    assert ranks(4, one_argmax) == [TWO] * 4


# (logits, target placement on dp, options, forward, backward)
LOSSES = {
    "vocabulary": (COLUMNS, {}, TWO, NONE),
    "vocabulary, smoothed": (COLUMNS, {"label_smoothing": 0.1}, TWO, NONE),
    "vocabulary, none": (COLUMNS, {"reduction": "none"}, TWO, NONE),
    "batch": (ROWS, {}, ONE, NONE),
    # On the CPU one for the question whether some rank has a target that is no class; other devices assert.
    "batch, sum": (ROWS, {"reduction": "sum"}, ONE, NONE),
    "both": (BOTH, {}, {"all_reduce": 3}, NONE),
    "both, sum": (BOTH, {"reduction": "sum"}, {"all_reduce": 3}, NONE),
    "vocabulary over all": ([Shard(1), Shard(1)], {}, TWO, NONE),
}


def cross_entropy_counts(name):
    placements, options, _, _ = LOSSES[name]
    torch.manual_seed(0)
    logits, target = spread(torch.randn(8, 13), placements), torch.randint(0, 13, (8,))
    rows = Shard(0) if placements[0] == Shard(0) else Replicate()
    labels = spread(target, [rows, Replicate()])
    return count(lambda x: F.cross_entropy(x, labels, **options), logits)


@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(ranks, name):
    _, _, forward, backward = LOSSES[name]
    assert ranks(4, cross_entropy_counts, name) == [(forward, backward)] * 4


def soft_targets():
    target = spread(torch.rand(8, 13), ROWS)
    return count(lambda x: F.cross_entropy(x, target), spread(torch.randn(8, 13), ROWS))


def test_a_mean_over_probabilities_costs_nothing(ranks):
    assert ranks(4, soft_targets) == [(NONE, NONE)] * 4


def low_precision_loss():
    """bfloat16 scores, vocabulary sharded: computed in float32, returned as bfloat16."""
    torch.manual_seed(0)
    x, target = torch.randn(8, 64).bfloat16() * 5, torch.randint(0, 64, (8,))
    logits = spread(x, [Replicate(), Shard(1)])
    loss = F.cross_entropy(logits, spread(target, [Replicate(), Replicate()]))
    loss.backward()
    wide = x.float().requires_grad_()
    want = F.cross_entropy(wide, target)
    want.backward()
    close = torch.allclose(loss.full_tensor(), want.bfloat16(), rtol=0, atol=0)
    grad = logits.grad.full_tensor()
    return loss.dtype, grad.dtype, close, torch.allclose(grad, wide.grad.bfloat16(), rtol=1e-2, atol=0)


def test_cross_entropy_accumulates_in_float32(ranks):
    assert ranks(4, low_precision_loss) == [(torch.bfloat16, torch.bfloat16, True, True)] * 4


TIES = [[1.0, 3.0, 3.0, 2.0], [3.0, 0.0, 3.0, 3.0], [2.0, 3.0, 1.0, 3.0]]
EXACT = {
    "amax": lambda x: x.amax(1),
    "amax of all": lambda x: x.amax(),
    "max of all": lambda x: x.max(),
    "min along": lambda x: x.min(1).values,
    "inf norm": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "std": lambda x: (x * 0).std(1),
    "norm": lambda x: torch.linalg.vector_norm(x * 0, 2, 1),
    "3-norm": lambda x: torch.linalg.vector_norm(x * 0, 3, 1),
}


def exact(name):
    """Gradients where PyTorch picks one subgradient of several."""
    found = []
    plain = torch.tensor(TIES, dtype=torch.float64, requires_grad=True)
    EXACT[name](plain).sum().backward()
    for placements in (BOTH, COLUMNS, ROWS, [Shard(1), Shard(1)]):
        x = spread(torch.tensor(TIES, dtype=torch.float64), placements)
        EXACT[name](x).sum().backward()
        found.append(torch.equal(x.grad.full_tensor(), plain.grad))
    return found


@pytest.mark.parametrize("name", EXACT)
def test_subgradients_are_those_of_torch(ranks, name):
    assert all(all(found) for found in ranks(4, exact, name))


TWICE = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "var": lambda x: x.var(1),
    "norm": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "prod": lambda x: x.prod(1),
    "cumsum": lambda x: x.cumsum(1),
    "amax": lambda x: x.amax(1),
    "mean": lambda x: x.mean(1),
}


def twice(name):
    torch.manual_seed(0)
    value, function = torch.randn(3, 5, dtype=torch.float64), TWICE[name]

    def second(x):
        (first,) = torch.autograd.grad((function(x) ** 2).sum(), x, create_graph=True)
        (first**2).sum().backward()
        return x.grad

    want = second(value.clone().requires_grad_())
    return torch.allclose(second(spread(value, BOTH)).full_tensor(), want)


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(ranks, name):
    assert all(ranks(4, twice, name))
