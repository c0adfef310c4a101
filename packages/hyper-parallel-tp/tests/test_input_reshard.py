"""input_reshard: what is kept, what it costs, and that nothing changes; plain and DTensor inputs, checkpointed too."""

import dataclasses
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    input_reshard,
    parallelize_module,
)
from hyper_parallel.utils.structures import tensors_of

R = Replicate()
BATCH, SEQUENCE, WIDTH = 2, 9, 8  # the sequence is uneven over four ranks


def tp_mesh(ndim):
    if ndim == 1:
        return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]


class Block(nn.Module):
    """Three projections of one input, one of them of another shape of it, and the input itself."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 12, dtype=torch.float64) for _ in range(3))
        self.o = nn.Linear(12, WIDTH, dtype=torch.float64)

    def forward(self, x, *, scale=None):
        flat = self.v(x.view(-1, WIDTH)).view(*x.shape[:2], -1)
        out = self.o(torch.tanh(self.q(x)) * self.k(x) + flat)
        return out * x if scale is None else out * scale


class Checkpointed(nn.Module):
    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x, **kwargs):
        return checkpoint(self.block, x, use_reentrant=self.reentrant, **kwargs)


def block(mesh, spread):
    torch.manual_seed(3)
    made = Block()
    if not spread:
        return made
    column = ColwiseParallel(use_local_output=False)
    plan = {"q": column, "k": column, "v": column, "o": RowwiseParallel(use_local_output=False)}
    return parallelize_module(made, mesh, plan)


def run(made, x, **kwargs):
    """Output, gradients, collectives of the forward and of the backward."""
    made.zero_grad()
    x = x.detach().requires_grad_()
    with CommTrace() as trace:
        out = made(x, **kwargs)
        forward = trace.counts
        (out.full_tensor() if hasattr(out, "full_tensor") else out).square().sum().backward()
    grads = [p.grad for p in made.parameters()] + [x.grad]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in (out.detach(), *grads)], forward, trace.counts


def value(seed=0):
    return torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def wrapped(made, checkpointing):
    return made if checkpointing is None else Checkpointed(made, checkpointing == "reentrant")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["plain module", "plain", "DTensor"])
@pytest.mark.parametrize("ndim", [1, 2])
def test_nothing_changes_but_one_all_gather_in_the_backward(ndim, kind, checkpointing):
    mesh = tp_mesh(ndim)
    x = value() if kind != "DTensor" else distribute_tensor(value(), mesh, [R])
    usual = wrapped(block(mesh, kind != "plain module"), checkpointing)
    cut = input_reshard(wrapped(block(mesh, kind != "plain module"), checkpointing), mesh, 1)
    want, forward, both = run(usual, x)
    for _ in range(2):
        got, cut_forward, cut_both = run(cut, x)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        assert cut_forward == forward
        assert cut_both - both == {"all_gather": 1}


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


PACKED = {"dict": lambda x: {"x": x}, "dataclass": Batch, "list of tuples": lambda x: [(x, None)]}


def is_kept(made, spread, packed=lambda x: x):
    """Whether the memory of the whole input outlives the forward."""
    source = (spread(value()) if spread else value()).requires_grad_()
    x = source * 1  # which nothing else needs
    memory = StorageWeakRef((x.to_local() if spread else x).untyped_storage())
    out = made(packed(x))
    del x
    gc.collect()
    alive = not memory.expired()
    out.sum().backward()
    assert source.grad is not None
    return alive


@pytest.mark.ranks(4)
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["plain module", "plain", "DTensor"])
def test_the_whole_input_is_not_kept(kind, checkpointing):
    mesh = tp_mesh(1)
    spread = (lambda v: distribute_tensor(v, mesh, [R])) if kind == "DTensor" else None
    parallel = kind != "plain module"
    assert is_kept(wrapped(block(mesh, parallel), checkpointing), spread)
    assert not is_kept(input_reshard(wrapped(block(mesh, parallel), checkpointing), mesh, 1), spread)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", PACKED)
def test_an_input_inside_of_others(kind):
    class Unpacked(Block):
        def forward(self, batch):
            return super().forward(next(tensors_of(batch)))

    assert is_kept(Unpacked(), None, PACKED[kind])
    assert not is_kept(input_reshard(Unpacked(), tp_mesh(1), 1), None, PACKED[kind])


@pytest.mark.ranks(4)
def test_an_input_in_flight():
    mesh = tp_mesh(1)
    made = input_reshard(Checkpointed(block(mesh, True), False), mesh, 1)
    grads = []
    for in_flight in (False, True):
        leaf = distribute_tensor(value(), mesh, [Shard(1)]).requires_grad_()
        x = leaf.redistribute(placements=[R], async_op=in_flight)
        assert backward_gathers(made, x) == 1
        grads.append(leaf.grad.to_local())
    assert torch.equal(*grads)


def backward_gathers(made, x):
    with CommTrace() as trace:
        made(x).sum().backward()
    return trace.phase("backward").get("all_gather", 0)


@pytest.mark.ranks(4)
def test_what_is_no_replica_is_left_alone():
    mesh = tp_mesh(1)
    made = input_reshard(nn.GELU(), mesh, 1)
    shards = distribute_tensor(value(), mesh, [Shard(2)]).requires_grad_()
    assert backward_gathers(made, shards) == 0
    want = value().requires_grad_()
    F.gelu(want).sum().backward()
    torch.testing.assert_close(shards.grad.full_tensor(), want.grad)
    # Whose dims do not reach, which are too small, and what the module makes itself from a replica.
    small = input_reshard(nn.GELU(), mesh, 1)
    for tensor in (torch.randn(3), torch.randn(1, 3), torch.randn(())):
        assert backward_gathers(small, tensor.requires_grad_()) == 0
    own = input_reshard(nn.Sequential(nn.Linear(8, 8), nn.GELU()), mesh, 0)
    assert backward_gathers(own, torch.ones(4, 8)) == 1  # the linear's input; not the other's


@pytest.mark.ranks(4)
def test_a_view_of_a_part_and_a_written_input_are_kept_whole():
    mesh = tp_mesh(1)

    class Parts(nn.Module):
        def forward(self, x):
            return x[:, 1:].exp() + x[:, :-1].sin() + x.transpose(1, 2).transpose(1, 2)[:, 1:] ** 2

    class Writes(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                first = (x * 1).clone()
            x = x * 1
            return (x.add_(1) * first).sin()

    for kind in (Parts, Writes):
        plain, x = value().requires_grad_(), value().requires_grad_()
        kind()(plain).sum().backward()
        input_reshard(kind(), mesh, 1)(x).sum().backward()
        torch.testing.assert_close(x.grad, plain.grad)


@pytest.mark.ranks(4)
def test_an_input_that_is_written_between_two_uses():
    """The first use keeps it as it was, by a slice; the second as it is, whole."""
    mesh = tp_mesh(1)

    class Writes(nn.Module):
        def forward(self, x, w):
            first = w * x
            with torch.no_grad():
                x.add_(1)
            return first + w * x

    w = torch.ones(BATCH, SEQUENCE, WIDTH, dtype=torch.float64, requires_grad=True)
    input_reshard(Writes(), mesh, 1)(value(), w).sum().backward()
    torch.testing.assert_close(w.grad, 2 * value() + 1)


@pytest.mark.ranks(4)
def test_an_exception_in_forward_leaves_no_hooks_behind():
    mesh = tp_mesh(1)

    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("x")

    for made in (Fails(), nn.Sequential(Fails())):
        with pytest.raises(KeyError):
            input_reshard(made, mesh, 1)(value())
    refusing = nn.Identity()
    refusing.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("before")))
    with pytest.raises(KeyError, match="before"):
        input_reshard(refusing, mesh, 1)(value())
    with CommTrace() as trace:
        x = value().requires_grad_()
        x.exp().sum().backward()
    assert not trace.counts


@pytest.mark.ranks(4)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_happens(context):
    made = input_reshard(nn.GELU(), tp_mesh(1), 1)
    with context():
        assert torch.equal(made(value()), F.gelu(value()))
    assert backward_gathers(made, value().requires_grad_()) == 1


@pytest.mark.ranks(4)
def test_second_backward_and_partial_backward():
    mesh = tp_mesh(1)
    made = input_reshard(block(mesh, True), mesh, 1)
    x = value().requires_grad_()
    out = made(x).full_tensor()
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(out.sum(), x)[0]
    assert torch.equal(first, second)


def test_without_a_dim_nothing_is_hooked_and_a_mesh_has_one_axis(ranks):
    assert input_reshard(module := nn.Linear(2, 2), None) is module
    assert not module._forward_pre_hooks
    ranks(4, refuse_larger_mesh)


def refuse_larger_mesh():
    with pytest.raises(ValueError, match="one mesh axis"):
        input_reshard(nn.Linear(2, 2), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), 0)
