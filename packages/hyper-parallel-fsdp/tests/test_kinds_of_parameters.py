"""Parameters of every kind under ``fully_shard``: frozen, tied, unused, tiny, empty, complex, with sparse gradients."""

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Block, batch, descend, mine, pair, same_gradients, train, wrap
from torch import nn

from hyper_parallel import Shard
from hyper_parallel_fsdp import MixedPrecisionPolicy, fully_shard


class Branches(nn.Module):
    """A frozen part, a tied weight, a number, a part that not every step uses, one that not every rank uses."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(11, 6), Block(), Block()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.never = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))
        self.experts = nn.ParameterList(nn.Parameter(torch.full((5, 6), 0.1 * i + 1)) for i in range(4))
        for parameter in self.first.up.parameters():
            parameter.requires_grad_(False)

    def forward(self, ids, second, expert):
        x = self.first(self.embed(ids))
        if second:
            x = self.second(x)
        return self.head(x * self.experts[expert]) * self.scale


@pytest.mark.ranks(4)
def test_frozen_tied_scalar_and_unused_parameters():
    plain, net = pair(Branches)
    for module in (net.embed, net.first, net.second, net):
        fully_shard(module)
    assert net.head.weight is net.embed.weight
    assert set(net.hsdp_params) == {"scale", "never", *(f"experts.{i}" for i in range(4)), "embed.weight"}
    for step in range(3):
        ids, _ = batch(step)
        # Each rank's part of the batch goes through the expert of its number; the last expert is never used.
        experts = [rank % 3 for rank in range(4)]
        parts = [plain(part, step, experts[r]).square().mean() for r, part in enumerate(ids.chunk(4))]
        (sum(parts) / 4).backward()
        net(mine(ids), step, experts[dist.get_rank()]).square().mean().backward()
        assert net.never.grad is None
        assert net.experts[3].grad is None
        assert net.first.up.weight.grad is None
        same_gradients(net, plain)
        descend(net)
        descend(plain)


@pytest.mark.ranks(4)
def test_frozen_after_wrapping_and_thawed():
    plain, net = pair()
    wrap(net)
    for frozen in (True, False):
        for each in (plain, net):
            each.blocks[1].requires_grad_(not frozen)
        train(net, plain, steps=2)
        assert (net.blocks[1].up.weight.grad is None) == (plain.blocks[1].up.weight.grad is None)


@pytest.mark.ranks(2)
def test_hook_of_a_parameter_sees_its_gradient():
    net = nn.Linear(4, 4)
    fully_shard(net)
    seen = []
    net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.layout))
    net(torch.ones(2, 4)).sum().backward()
    assert seen == [net.weight.layout]


class Tiny(nn.Module):
    """Smaller than the number of ranks, a number, an empty one, one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.row, self.number = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.tensor(0.5))
        self.empty, self.transposed = nn.Parameter(torch.empty(0, 6)), nn.Parameter(torch.randn(6, 5).t())

    def forward(self, x):
        return (x * self.row + self.number) @ self.transposed.t() + self.empty.sum()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight.t()).abs() * self.scale


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.embed(x.long().abs() % 7))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [Tiny, Complex, Looked])
@pytest.mark.parametrize("last_dim", [False, True])
def test_odd_parameters_over_three_ranks(kind, last_dim):
    plain, net = pair(kind)
    where = (lambda p: Shard(p.ndim - 1) if p.ndim else None) if last_dim else None
    fully_shard(net, shard_placement_fn=where, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))

    def inputs(step):
        return (3 * torch.randn(12, 6, generator=torch.Generator().manual_seed(step)),)

    train(net, plain, batch=inputs, loss_of=lambda each, x: each(x).square().mean())
