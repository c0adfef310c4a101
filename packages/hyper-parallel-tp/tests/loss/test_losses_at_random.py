"""Losses over random shapes, layouts, options and values against plain PyTorch. HYPER_PARALLEL_FUZZ=1000 runs more."""

import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import CommTrace, PackedShard, Replicate, Shard, distribute_tensor, init_device_mesh

R = Replicate()
COUNT = int(os.environ.get("HYPER_PARALLEL_FUZZ", "40"))
BATCH = 20  # configurations per call of the ranks
MESHES = ((4,), (2, 2), (1, 4), (4, 1))


class Draw:
    """One configuration; the same on all ranks for the same seed."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.mesh_shape = rng.choice(MESHES)
        self.loss = rng.choice(("cross_entropy", "cross_entropy", "nll_loss", "log_softmax", "linear_cross_entropy"))
        self.dtype = rng.choice((torch.float64, torch.float32, torch.bfloat16))
        self.classes = rng.choice((1, 2, 3, 5, 8, 13, 40))
        ndim = rng.choice((2, 3)) if self.loss == "linear_cross_entropy" else rng.choice((1, 2, 2, 3, 4))
        self.batch = tuple(rng.choice((1, 2, 3, 5, 8)) for _ in range(ndim - 1))
        self.soft = self.loss == "cross_entropy" and rng.random() < 0.3
        self.options = {"reduction": rng.choice(("mean", "sum", "none"))}
        if not self.soft and rng.random() < 0.7:
            self.options["ignore_index"] = rng.choice((-100, 255, rng.randrange(self.classes)))
        if self.loss not in ("nll_loss", "log_softmax") and rng.random() < 0.4:
            self.options["label_smoothing"] = rng.choice((0.1, 0.5, 1.0))
        # Per mesh axis: None, the index of a batch dim, or "classes".
        dims = [None, "classes", "classes", *range(len(self.batch))]
        self.axes = [rng.choice(dims) for _ in self.mesh_shape]
        self.weight = rng.choice((None, None, "whole", "sharded"))
        self.packed = self.axes.count("classes") == 1 and rng.random() < 0.2
        self.features = rng.choice((1, 3, 8))
        self.bias = rng.random() < 0.5
        self.chunk = rng.choice((1, 2, 3, 100))

    def __str__(self):
        return str({k: v for k, v in vars(self).items() if k not in ("rng", "generator")})

    def numbers(self, *shape):
        """Ordinary, or now and then huge; scores may be minus infinity."""
        value = torch.randn(*shape, dtype=torch.float64, generator=self.generator)
        kind = self.rng.random()
        return (value * (100 if kind < 0.1 else 0 if kind < 0.15 else 1)).to(self.dtype)

    def placements(self, batch_dim, classes_dim):
        """Of a tensor: ``batch_dim`` gives the dim of a batch dim, ``classes_dim`` is that of the classes or None."""
        made = []
        for axis in self.axes:
            if axis is None or (axis == "classes" and classes_dim is None):
                made.append(R)
            elif axis == "classes":
                first = self.classes // 2
                sections = (first, self.classes - first)
                made.append(PackedShard(classes_dim, sections) if self.packed else Shard(classes_dim))
            else:
                made.append(R if batch_dim is None else Shard(batch_dim(axis)))
        return made

    def tensors(self):
        """Name to (plain tensor, placements, whether it wants a gradient)."""
        linear, made = self.loss == "linear_cross_entropy", {}
        if linear:
            made["input"] = self.numbers(*self.batch, self.features), self.placements(int, None), True
            head = self.numbers(self.classes, self.features)
            made["linear_weight"] = head, self.placements(None, 0), True
            if self.bias:
                made["linear_bias"] = self.numbers(self.classes), self.placements(None, 0), True
        else:
            at = min(len(self.batch), 1)
            shape = (*self.batch[:at], self.classes, *self.batch[at:])
            scores = self.numbers(*shape)
            if self.loss == "cross_entropy" and not self.soft and self.classes > 2 and self.rng.random() < 0.1:
                scores = torch.where(torch.rand(*shape, generator=self.generator) < 0.2, -torch.inf, scores)
            of_scores = self.placements(lambda d: d if d < at else d + 1, at)
            made["input"] = scores, of_scores, True
        if self.soft:
            target = torch.rand(*shape, dtype=torch.float64, generator=self.generator).to(self.dtype)
            made["target"] = target, of_scores, self.rng.random() < 0.5
        else:
            target = torch.randint(self.classes, self.batch, generator=self.generator)
            ignored = torch.rand(self.batch, generator=self.generator) < self.rng.choice((0, 0.4, 1))
            made["target"] = (
                target.where(~ignored, self.options.get("ignore_index", -100)),
                self.placements(int, None),
                False,
            )
        if self.weight:
            weight = (torch.rand(self.classes, dtype=torch.float64, generator=self.generator) + 0.1).to(self.dtype)
            sharded = self.weight == "sharded"
            made["weight"] = weight, self.placements(None, 0) if sharded else [R] * len(self.axes), False
        return made


def plain_loss(draw, tensors):
    """In float32 or wider: what follows from the given values."""
    wide = {k: v.float() if v.dtype is torch.bfloat16 else v for k, v in tensors.items()}
    if draw.loss != "linear_cross_entropy":
        return class_loss(draw, wide)
    x, head, bias = wide.pop("input"), wide.pop("linear_weight"), wide.pop("linear_bias", None)
    scores = F.linear(x, head, bias)
    if draw.dtype is torch.bfloat16:  # which the scores are in too
        scores = scores.bfloat16().float()
    return F.cross_entropy(scores.movedim(-1, 1), **wide, **draw.options)


def our_loss(draw, tensors):
    options = dict(draw.options)
    if draw.loss == "linear_cross_entropy":
        options["options"] = nn.LinearCrossEntropyOptions(batch_chunk_size=draw.chunk, chunking_method=None)
        head = {k: tensors.pop(k) for k in ("input", "linear_weight", "target")}
        return F.linear_cross_entropy(*head.values(), **tensors, **options)
    return class_loss(draw, tensors)


def class_loss(draw, tensors):
    if draw.loss != "log_softmax":
        return getattr(F, draw.loss)(**tensors, **draw.options)
    scores = tensors["input"]
    return F.nll_loss(**{**tensors, "input": F.log_softmax(scores, min(scores.ndim - 1, 1))}, **draw.options)


def gradients(loss, leaves):
    seed = None if loss.ndim == 0 else torch.linspace(1, 2, loss.numel()).view(loss.shape).to(loss.dtype)
    return torch.autograd.grad(loss, leaves, seed)


def check(seed):
    draw = Draw(seed)
    made = draw.tensors()
    mesh = init_device_mesh("cpu", draw.mesh_shape, mesh_dim_names=("a", "b")[: len(draw.mesh_shape)])
    plain = {name: value.clone().requires_grad_(wants) for name, (value, _, wants) in made.items()}
    ours = {
        name: distribute_tensor(value, mesh, placements, src_data_rank=None).requires_grad_(wants)
        for name, (value, placements, wants) in made.items()
    }
    leaves = [name for name, (_, _, wants) in made.items() if wants]
    close = {torch.float64: (1e-9, 1e-9), torch.float32: (2e-4, 2e-4), torch.bfloat16: (3e-2, 3e-2)}[draw.dtype]
    want, loss = plain_loss(draw, plain), our_loss(draw, dict(ours))
    scale = max(
        1.0, *(float(t.detach().abs().nan_to_num(0, 0, 0).max()) for t in plain.values() if t.is_floating_point())
    )

    def equal(got, expected):
        got, expected = got.full_tensor().detach().double(), expected.detach().double()
        torch.testing.assert_close(got, expected, rtol=close[0], atol=close[1] * scale, equal_nan=True)

    equal(loss, want)
    with CommTrace() as trace:
        found = gradients(loss, [ours[n] for n in leaves])
    if draw.loss == "log_softmax":
        assert not trace.counts
    for name, got, expected in zip(leaves, found, gradients(want, [plain[n] for n in leaves]), strict=True):
        assert got.layout is ours[name].layout, name
        equal(got, expected)


def check_many(seeds):
    """Messages of the configurations that differ."""
    found = []
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            found.append(f"seed {seed}: {Draw(seed)}\n{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("start", range(0, COUNT, BATCH))
def test_random_losses(ranks, start):
    by_rank = ranks(4, check_many, range(start, min(start + BATCH, COUNT)), timeout=300)
    assert by_rank == [[]] * 4, by_rank[0][:3]
