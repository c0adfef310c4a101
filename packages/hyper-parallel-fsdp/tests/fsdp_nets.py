"""For the fully_shard tests: a net with uneven parameters, and its training beside the same net on one device."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hyper_parallel import CommTrace, DTensor
from hyper_parallel_fsdp import fully_shard

BLOCKS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 19), nn.Linear(19, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """11 rows of the embedding and 19 of the hidden layer are uneven over 2 and over 4 ranks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pair(kind=Net):
    torch.manual_seed(0)
    plain = kind()
    return plain, copy.deepcopy(plain)


def wrap(net, **options):
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def batch(step, size=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (size, 5), generator=generator), torch.randint(0, 11, (size, 5), generator=generator)


def mine(whole):
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(net, ids, labels):
    return F.cross_entropy(net(ids).flatten(0, 1), labels.flatten())


def same_gradients(net, plain):
    for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            assert got.grad.layout is got.layout, name
            grad = want.grad.to_dense() if want.grad.is_sparse else want.grad
            torch.testing.assert_close(got.grad.full_tensor(), grad, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def descend(net):
    """A step of gradient descent; on the local pieces, where there are some."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            local = [t._local if isinstance(t, DTensor) else t for t in (parameter, parameter.grad)]
            local[0].sub_(0.1 * (local[1].to_dense() if local[1].is_sparse else local[1]))
        parameter.grad = None


def train(net, plain, steps=3, batch=batch, loss_of=loss_of):
    """Both nets side by side; the trace of each of our steps."""
    traces = []
    for step in range(steps):
        want = loss_of(plain, *batch(step))
        want.backward()
        with CommTrace() as trace:
            loss = loss_of(net, *map(mine, batch(step)))
            loss.backward()
        traces.append(trace)
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / dist.get_world_size(), want.detach(), rtol=1e-5, atol=1e-6)
        same_gradients(net, plain)
        descend(net)
        descend(plain)
    return traces
