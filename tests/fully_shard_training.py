"""A small model, and its training beside the same model on one device, for the tests of ``fully_shard``."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    DTensor,
    RowwiseParallel,
    clip_grad_norm_,
    fully_shard,
    parallelize_module,
)

LAYERS, WORDS, WIDTH, HIDDEN = 2, 13, 8, 18  # 13 rows are uneven over 2 and 4 ranks; 18 / 2 / 2 too


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, layer=Layer):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def pair(layer=Layer):
    torch.manual_seed(0)
    plain = Model(layer)
    return plain, copy.deepcopy(plain)


def wrap(model, shard=fully_shard, **options):
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def loss_of(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sgd(parameters):
    """The optimizer that judges: what is wrong with a gradient is as wrong with its parameter."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(parameters):
    """Divides gradients by their own size: it hides a wrong scale, and makes rounding of small ones large."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def assert_near(got, want, tolerance, name):
    """By the norm of the difference: a single element that is small may be off by more than its own size."""
    off, size = (whole(got) - want).norm(), want.norm()
    assert off <= tolerance * size, f"{name}: off by {off:.2e}, which is more than {tolerance} of {size:.2e}"


class Side:
    """A model and its optimizer."""

    def __init__(self, model, clip, optimizer=sgd):
        self.model, self.clip = model, clip
        self.optimizer = optimizer(model.parameters())

    def backward(self, *losses):
        """The value of the last loss."""
        self.optimizer.zero_grad()
        for loss in losses:
            value = loss()
            value.backward()
        return value.detach()

    def step(self):
        norm = self.clip(self.model.parameters(), 0.5)
        self.optimizer.step()
        return whole(norm).detach()


def train(model, plain, part, steps=4, batch=8, optimizer=sgd, tolerance=1e-5, others=()):
    """Train both; ``part`` gives this rank's part of a batch. Returns the trace of each step."""
    ours, theirs = Side(model, clip_grad_norm_, optimizer), Side(plain, nn.utils.clip_grad_norm_, optimizer)
    more = [Side(other, nn.utils.clip_grad_norm_, optimizer) for other in others]
    traces = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids, labels = (torch.randint(0, WORDS, (batch, 5), generator=generator) for _ in range(2))
        expected = theirs.backward(lambda: loss_of(plain, ids, labels))  # noqa: B023
        with CommTrace() as trace:
            loss = ours.backward(lambda: loss_of(model, part(ids), part(labels)))  # noqa: B023
        traces.append(trace)
        mean = whole(loss).clone()  # of the ranks' parts of the batch, which are equal in size
        dist.all_reduce(mean)
        for other in more:
            other.backward(lambda: loss_of(other.model, part(ids), part(labels)))  # noqa: B023
        close = {"rtol": 0, "atol": tolerance}
        torch.testing.assert_close(mean / dist.get_world_size(), expected, **close)
        for side in (ours, *more):
            for (name, got), want in zip(side.model.named_parameters(), plain.parameters(), strict=True):
                assert_near(got.grad, want.grad, tolerance, name)
        norm = theirs.step()
        for side in (ours, *more):
            torch.testing.assert_close(side.step(), norm, **close)
            for (name, got), want in zip(side.model.named_parameters(), plain.parameters(), strict=True):
                assert_near(got.detach(), want.detach(), tolerance, name)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.grad.layout is parameter.layout
    return traces


def part_over(mesh, *names):
    """This rank's part of a batch over some axes of a mesh."""
    index = 0
    for name in names:
        index = index * mesh[name].size() + mesh.get_local_rank(name)
    count = 1
    for name in names:
        count *= mesh[name].size()
    return lambda batch: batch.chunk(count)[index]


def tensor_parallel(model, mesh):
    plan = {"layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan, src_data_rank=None)
