"""``torch.utils.checkpoint``, reentrant and not, on DTensors."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from hyper_parallel import CommTrace, Partial, Replicate, Shard, implicit_replication
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make

both_kinds = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
PLACED = {
    "data parallel": ([Shard(0)], [Replicate()], [Replicate()]),
    "tensor parallel": ([Replicate()], [Shard(1)], [Shard(0)]),
    "sequence parallel": ([Shard(0)], [Shard(1)], [Shard(0)]),
    "pending": ([Partial()], [Replicate()], [Shard(0)]),
}
placed = pytest.mark.parametrize("layout", PLACED)


def values():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, 4), (4, 6), (6, 4))]


def block(x, w1, w2):
    if hasattr(x, "redistribute") and x.placements == w2.placements == (Shard(0),):  # gather the sequence
        x = x.redistribute(placements=[Replicate()])
    hidden = torch.tanh(x @ w1) @ w2
    return x + hidden.tanh(), hidden


def run(step, tensors):
    loss = step(*tensors)
    loss.backward()
    return loss


def compare(step, layout):
    plain = [v.requires_grad_() for v in values()]
    expected = run(step, plain)
    tensors = [make(v, mesh_of((4,)), p, requires_grad=True) for v, p in zip(values(), PLACED[layout], strict=True)]
    loss = run(step, tensors)
    torch.testing.assert_close(loss.detach().full_tensor(), expected.detach())
    for tensor, want in zip(tensors, plain, strict=True):
        assert tensor.grad.placements == tensor.grad_placements
        torch.testing.assert_close(tensor.grad.full_tensor(), want.grad)


@pytest.mark.ranks(4)
@both_kinds
@placed
def test_gradients_are_those_of_one_device(reentrant, layout):
    def step(x, w1, w2):
        h = x * 2
        y, hidden = checkpoint(block, h, w1, w2, use_reentrant=reentrant)
        return (y * h).sum() + hidden.square().mean()

    compare(step, layout)


@pytest.mark.ranks(4)
@both_kinds
def test_chained_and_nested_checkpoints(reentrant):
    def step(x, w1, w2):
        def inner(x):
            return checkpoint(block, x, w1, w2, use_reentrant=reentrant)[0]

        x = checkpoint(inner, x * 1, use_reentrant=reentrant)
        x = checkpoint(inner, x, use_reentrant=reentrant)
        return checkpoint(lambda t: t.sin(), x, use_reentrant=reentrant).sum()

    compare(step, "tensor parallel")
    compare(step, "data parallel")


@pytest.mark.ranks(4)
@both_kinds
def test_one_output_used_twice_and_one_not_at_all(reentrant):
    def step(x, w1, w2):
        y, _ = checkpoint(block, x * 1, w1, w2, use_reentrant=reentrant)
        return (y * 2).sum() + (y * y).sum()

    compare(step, "tensor parallel")


@pytest.mark.ranks(4)
@both_kinds
@placed
def test_dropout_repeats_its_mask(reentrant, layout):
    def dropping(x, w1, w2):
        y, hidden = block(x, w1, w2)
        return F.dropout(y, 0.5) + F.dropout(hidden, 0.3)

    def step(x, w1, w2):
        torch.manual_seed(5)
        y = checkpoint(dropping, x * 1, w1, w2, use_reentrant=reentrant, preserve_rng_state=True)
        torch.rand(3)  # moves the generator, which the recomputation must set back
        return y.square().sum()

    compare(step, layout)


@pytest.mark.ranks(4)
@both_kinds
def test_the_block_runs_again_in_backward_and_its_memory_is_dropped(reentrant):
    calls = []

    def counted(x, w):
        calls.append(1)
        return torch.tanh(x @ w)

    x, w = (
        make(v, mesh_of((4,)), p, requires_grad=True)
        for v, p in zip(values()[:2], ([Replicate()], [Shard(1)]), strict=True)
    )
    y = checkpoint(counted, x * 1, w, use_reentrant=reentrant)
    with CommTrace() as trace:
        y.sum().backward()
    assert len(calls) == 2
    assert trace.counts == {"all_reduce": 1}  # the gradient of x; nothing more than without checkpoint


@pytest.mark.ranks(4)
@both_kinds
def test_modules_keyword_arguments_and_plain_arguments(reentrant):
    def step(x, w1, w2):
        def scaled(x, factor, flag):
            assert flag
            return (x @ w1) * factor

        return checkpoint(scaled, x * 1, 3.0, True, use_reentrant=reentrant).sum() + w2.sum()

    compare(step, "tensor parallel")


@pytest.mark.ranks(4)
@both_kinds
def test_checkpoint_sequential(reentrant):
    def step(x, w1, w2):
        functions = [lambda t: t @ w1, torch.tanh, lambda t: t @ w2, torch.sin]
        return checkpoint_sequential(functions, 2, x * 1, use_reentrant=reentrant).sum()

    compare(step, "tensor parallel")


@pytest.mark.ranks(4)
def test_reentrant_checkpoint_refuses_autograd_grad_as_on_one_device():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    y = checkpoint(torch.sin, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        torch.autograd.grad(y.sum(), x)
    z = checkpoint(torch.sin, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(gradient.full_tensor(), values()[0].cos())


@pytest.mark.ranks(4)
def test_a_recomputation_that_differs_is_found():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    calls = []

    def unstable(x):
        calls.append(1)
        return torch.sin(x) * torch.cos(x) if len(calls) == 1 else torch.sin(x)

    y = checkpoint(unstable, x, use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()


@pytest.mark.ranks(4)
def test_a_checkpoint_may_end_in_what_is_pending_without_gradients():
    value = values()[0]
    for op in (lambda t: (t * 2).norm(), lambda t: (t * 2).amax(0), lambda t: (t * 2).norm(3, 0)):
        plain = value.clone().requires_grad_()
        op(plain).square().sum().backward()
        x = make(value, mesh_of((4,)), [Shard(0)], requires_grad=True)
        checkpoint(op, x, use_reentrant=True).square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
def test_a_pending_norm_is_carried_out_where_it_is_written():
    value = values()[0]
    x = make(value, mesh_of((4,)), [Shard(1)])
    with torch.no_grad():
        for _ in range(2):
            out = torch.norm(x, dim=-1, keepdim=True).square_().div_(3)
            torch.testing.assert_close(out.full_tensor(), value.norm(dim=-1, keepdim=True).square() / 3)


@pytest.mark.ranks(2)
@both_kinds
def test_what_met_in_the_forward_meets_again_in_the_backward(reentrant):
    """A model's forward lets plain tensors count as Replicate; the backward computes a part of it outside of that."""
    value, scale = values()[0], torch.arange(1.0, 5.0, dtype=torch.float64)

    def scaled(t):
        with torch.no_grad():  # as an indexer does
            factor = (t.detach() * scale).sign()
        return torch.sin(t * scale) * factor

    x = make(value, mesh_of((2,)), [Shard(0)], requires_grad=True)
    with implicit_replication():
        y = checkpoint(scaled, x * 1, use_reentrant=reentrant)
    y.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), (value * scale).cos() * scale * value.sign())
    with pytest.raises(RuntimeError, match="a plain tensor of shape"):
        x * scale


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


@pytest.mark.ranks(2)
def test_a_function_that_saved_a_plain_tensor():
    value, scale = values()[0], torch.arange(1.0, 5.0, dtype=torch.float64)
    x = make(value, mesh_of((2,)), [Shard(0)], requires_grad=True)
    with implicit_replication():
        y = Scaled.apply(x, scale)
    y.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), scale.expand(5, 4))
