"""Deferred tensors: what was done to them is made block by block, with the numbers that one device has."""

import math

import pytest
import torch
from torch import nn

from hyper_parallel.checkpoint import build_on_meta, give_memory, give_values
from hyper_parallel.checkpoint.deferred import construction
from hyper_parallel.checkpoint.deferred.tensor import DeferredTensor, deferred, value_of
from hyper_parallel.checkpoint.deferred.values import DeferredValue


class Counted(DeferredValue):
    """A tensor of which it is noted how much is asked for."""

    def __init__(self, tensor):
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor, self.read = tensor, 0

    def make(self, bounds):
        found = self.tensor[tuple(slice(a, b) for a, b in bounds)]
        self.read += found.numel()
        return found


A = torch.arange(48.0).reshape(6, 8)
B = torch.arange(100.0, 196.0).reshape(12, 8)

# What is done; whether a block is made of no more than blocks.
CHANGES = {
    "stacked": (lambda a, b: torch.stack([a, b[:6], a * 2]), True),
    "stacked inside": (lambda a, b: torch.stack([a, b[6:]], dim=-1), True),
    "joined": (lambda a, b: torch.cat([a, b, a]), True),
    "joined columns": (lambda a, b: torch.cat([b[::1][:6], a], dim=1), True),
    "cut": (lambda a, b: torch.cat(torch.chunk(b, 3)[1:]), True),
    "split": (lambda a, b: b.split([5, 3], dim=1)[1], True),
    "transposed": (lambda a, b: b.t().contiguous(), True),
    "permuted": (lambda a, b: b.view(3, 4, 8).permute(2, 0, 1), True),
    "rows of heads": (lambda a, b: b.view(3, 2, 2, 8).transpose(1, 2).reshape(12, 8), True),
    "interleaved": (lambda a, b: b.reshape(2, 6, 8).transpose(0, 1).reshape(12, 8).contiguous(), True),
    "flattened": (lambda a, b: b.reshape(-1), True),
    "other groups": (lambda a, b: b.reshape(4, 6, 4), True),
    "one more dim": (lambda a, b: b[:, None].expand(12, 3, 8), True),
    "picked": (lambda a, b: torch.stack(b.unbind()[2:5]), True),
    "last": (lambda a, b: b[-1] + a.select(1, 3).sum(), False),
    "computed": (lambda a, b: (a + b[:6, :1]).exp2().clamp(max=9.0).to(torch.float64), True),
    "sorted": (lambda a, b: b.sort(dim=1, descending=True).values, False),
    "every other": (lambda a, b: b[:, ::2], False),
    "looked up": (lambda a, b: torch.tensor([1.5, 2.5, 4.0])[(b % 3).long()], False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_block_is_that_of_the_whole(name):
    change, in_blocks = CHANGES[name]
    want = change(A, B)
    sources = Counted(A), Counted(B)
    made = change(*(deferred(source) for source in sources))
    assert isinstance(made, DeferredTensor)
    assert (made.shape, made.dtype, made.stride()) == (want.shape, want.dtype, want.stride())
    assert [source.read for source in sources] == [0, 0]
    value = value_of(made)
    assert torch.equal(value.whole(), want)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ends = [sorted(torch.randint(0, n + 1, (2,), generator=generator).tolist()) for n in want.shape]
        for source in sources:
            source.read = 0
        assert torch.equal(value.block(tuple(map(tuple, ends))), want[tuple(slice(*end) for end in ends)])
        if in_blocks and math.prod(b - a for a, b in ends) == 1:
            assert sum(source.read for source in sources) < 48
    if in_blocks:
        for source in sources:
            source.read = 0
        value.block(tuple((0, 1) for _ in want.shape))
        assert sum(source.read for source in sources) <= 8


def test_what_needs_the_numbers_gets_them():
    tensor = deferred(Counted(A))
    assert tensor.sum().item() == A.sum().item()
    assert torch.zeros(6, 8).copy_(tensor).equal(A)
    assert repr(tensor) == "DeferredTensor(shape=(6, 8), dtype=torch.float32)"


class Net(nn.Module):
    """Weights that are set in every way that constructors know."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(40, 30)
        self.down = nn.Linear(30, 40, dtype=torch.bfloat16)
        self.embed = nn.Embedding(50, 40, padding_idx=3)
        self.tied = nn.Linear(40, 50, bias=False)
        self.tied.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(30, 30) * 0.5)
        self.decay = nn.Parameter(torch.log(torch.empty(900).uniform_(1, 16)))
        self.own = nn.Parameter(torch.randn(20, 50) / 7)
        self.frozen = nn.Parameter(torch.arange(1000.0).view(20, 50), requires_grad=False)
        self.register_buffer("angles", 1.0 / (10000 ** (torch.arange(0, 600, 2) / 600)), persistent=False)
        self.plain = torch.arange(700.0)
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        self.bounded = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 40), a=-0.5, b=0.5))  # draws until all fit
        self.far = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 40), a=1.5, b=3))
        nn.init.orthogonal_(self.tied.weight[:40])
        with torch.no_grad():
            self.up.weight[3:5].mul_(3)
            self.up.weight.view(-1)[::7].zero_()
            self.scale.t()[0].normal_()
            self.down.weight.data.copy_(self.up.weight.t() + 1)
            self.embed.weight[7].fill_(self.up.weight.abs().max().item())


@pytest.mark.parametrize("small", [0, 64, 4096])
def test_a_module_without_memory_gets_the_values_that_one_device_draws(small, monkeypatch):
    monkeypatch.setattr(construction, "SMALL", small)
    torch.manual_seed(3)
    net, after = Net(), torch.rand(3)
    torch.manual_seed(3)
    other, values = build_on_meta(Net)
    assert torch.equal(torch.rand(3), after)
    assert all(tensor.is_meta for tensor in (*other.parameters(), *other.buffers()))
    assert torch.equal(other.plain, net.plain)
    torch.manual_seed(8)  # numbers are those of the constructor
    give_memory(other, "cpu")
    assert other.tied.weight is other.embed.weight
    give_values(other, values)
    for (name, got), want in zip(other.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(got, want), name
        assert (got.dtype, got.requires_grad, type(got)) == (want.dtype, want.requires_grad, type(want))
    assert torch.equal(other.angles, net.angles)
    torch.manual_seed(8)
    state = torch.get_rng_state()
    build_on_meta(Net, draw=False)
    assert torch.equal(torch.get_rng_state(), state)
