"""Modules run in every way that a program finds: recomputed, several times, in part, failing, compiled."""

import copy
import dataclasses

import pytest
import torch
from fsdp_nets import BLOCKS, batch, loss_of, mine, pair, same_gradients, train, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import CommTrace, DTensor
from hyper_parallel_fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_activation_checkpointing(place, reentrant):
    plain, net = pair()
    if place == "outside":
        wrap(net)

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    net.blocks = nn.ModuleList(Checkpointed(b) for b in net.blocks)
    if place == "inside":
        wrap(net)
    trace = train(net, plain)[-1]
    # Computing a forward again gathers nothing again. (A reentrant one outside does not know that it is the last.)
    again = BLOCKS - 1 if (place, reentrant) != ("outside", True) else BLOCKS
    assert trace.counts == {"all_gather": BLOCKS + 1 + again, "reduce_scatter": BLOCKS + 1}


@pytest.mark.ranks(4)
def test_several_forwards_before_one_backward_reduce_once():
    plain, net = pair()
    wrap(net)
    for _ in range(2):
        (loss_of(plain, *batch(0)) + loss_of(plain, *batch(1))).backward()
        with CommTrace() as trace:
            losses = [loss_of(net, *map(mine, batch(step))) for step in range(2)]
            sum(losses).backward()
        assert trace.counts["reduce_scatter"] == BLOCKS + 1
        same_gradients(net, plain)
    # And each with a backward of its own, in the other order.
    losses = [loss_of(plain, *batch(step)) for step in range(2)]
    ours = [loss_of(net, *map(mine, batch(step))) for step in range(2)]
    for step in (1, 0):
        losses[step].backward()
        ours[step].backward()
    same_gradients(net, plain)


class InDataclasses(nn.Module):
    """Takes and returns tensors inside of dataclasses."""

    @dataclasses.dataclass(frozen=True)
    class Values:
        hidden: torch.Tensor
        name: str = "values"

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, values):
        return self.Values(self.inner(values.hidden))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)])
def test_tensors_inside_of_dataclasses(policy):
    """Their gradients are reduced, their precision is the policy's."""
    torch.manual_seed(0)
    plain = InDataclasses()
    net = fully_shard(copy.deepcopy(plain), **({} if policy is None else {"mp_policy": policy}))
    x = torch.randn(4, 6)
    out, want = net(net.Values(x)).hidden, plain(plain.Values(x)).hidden
    close = {} if policy is None else {"rtol": 0.02, "atol": 0.02, "check_dtype": False}
    assert out.dtype is (torch.float32 if policy is None else torch.float64)
    torch.testing.assert_close(out, want, **close)
    out.sum().backward()
    want.sum().backward()
    for got, single in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), single.grad, **close)


@pytest.mark.ranks(4)
def test_two_backwards_through_one_graph_and_gradients_of_inputs():
    plain, net = pair()
    wrap(net)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, generator=generator, requires_grad=True)
    part = mine(x.detach()).clone().requires_grad_()
    want, got = plain.blocks[0](x).square().mean(), net.blocks[0](part).square().mean()
    for _ in range(2):
        want.backward(retain_graph=True)
        got.backward(retain_graph=True)
    same_gradients(net.blocks[0], plain.blocks[0])
    torch.testing.assert_close(part.grad / 4, mine(x.grad))
    (again,) = torch.autograd.grad(net.blocks[0](part).square().mean(), part)
    torch.testing.assert_close(2 * again, part.grad)


@pytest.mark.ranks(4)
def test_usable_after_exceptions():
    plain, net = pair()
    wrap(net)
    train(net, plain, steps=2)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    def in_forward(mod, args):
        raise ZeroDivisionError

    def in_backward(mod, args):
        return (Fails.apply(*args),)

    parameters = list(net.parameters())
    for failing in (in_forward, in_backward, in_backward):
        handle = net.blocks[1].register_forward_pre_hook(failing)
        with pytest.raises(ZeroDivisionError):
            loss_of(net, *map(mine, batch(7))).backward()
        handle.remove()
        if failing is in_forward:
            assert all(isinstance(p, DTensor) for p in net.parameters())
        for parameter in parameters:
            parameter.grad = None
        train(net, plain, steps=2)  # the next forward cleans up


@pytest.mark.ranks(4)
def test_evaluation_between_steps_sees_the_new_parameters():
    plain, net = pair()
    wrap(net)
    ids, _ = batch(0)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(net.eval()(mine(ids)), plain(mine(ids)))
        assert all(isinstance(p, DTensor) for p in net.parameters())
        train(net.train(), plain, steps=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter._local.zero_()
        assert not net(ids).any()


@pytest.mark.ranks(4)
def test_another_forward_method():
    plain, net = pair()
    wrap(net)
    for each in (plain, net):
        each.score = lambda ids, each=each: each.head(each.embed(ids)).square().mean()
        register_fsdp_forward_method(each, "score")
    ids, _ = batch(0)
    plain.score(ids).backward()
    net.score(mine(ids)).backward()
    same_gradients(net, plain)


@pytest.mark.ranks(4)
def test_wrapped_modules_called_without_the_root():
    plain, net = pair()
    wrap(net)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        plain.blocks[0](x).square().mean().backward()
        net.blocks[0](mine(x)).square().mean().backward()
        same_gradients(net.blocks[0], plain.blocks[0])
        for each in (net, plain):
            each.zero_grad()
        train(net, plain, steps=1)


@pytest.mark.ranks(2)
def test_compiled_before_and_after_wrapping():
    plain, net = pair()
    net.blocks[0].compile(backend="eager")
    wrap(net)
    net.blocks[1].compile(backend="aot_eager")
    for trace in train(net, plain):
        assert trace.counts["reduce_scatter"] == BLOCKS + 1


@pytest.mark.ranks(2)
def test_what_was_gathered_ahead_in_vain_is_not_used_after_a_change():
    plain, net = pair()
    wrap(net)
    for each in (plain, net):  # so that the backward of block 0 does not run, for which block 1 gathers it
        each.embed.requires_grad_(False)
        each.blocks[0].requires_grad_(False)
    net.set_reshard_after_backward(False)
    for _ in range(2):
        train(net, plain, steps=2)
        with torch.no_grad():
            for each in (plain, net):
                for parameter in each.blocks[0].parameters():
                    getattr(parameter, "_local", parameter).mul_(1.5)


@pytest.mark.ranks(2)
def test_second_derivatives_of_parameters_that_are_kept():
    plain, net = pair()
    wrap(net)
    net.set_reshard_after_backward(False)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for each, part, ranks in ((plain, x, 1), (net, mine(x), 2)):  # gradients are averaged over the ranks
        block, part = each.blocks[0], part.clone().requires_grad_()
        out = block(part).square().sum()
        (gradient,) = torch.autograd.grad(out, part, create_graph=True)
        (ranks * (out + gradient.square().sum())).backward()
    same_gradients(net.blocks[0], plain.blocks[0])
