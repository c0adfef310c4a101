"""Chains of views over random shapes and layouts against plain PyTorch: values, gradients, and writes through them.

HYPER_PARALLEL_FUZZ=1000 runs more.
"""

import math
import os
import random
import traceback

import pytest
import torch

from hyper_parallel import redistribute_policy
from hyper_parallel.errors import RedistributionError
from hyper_parallel.testing.layouts import tensor_placements
from hyper_parallel.testing.placing import make, mesh_of

COUNT = int(os.environ.get("HYPER_PARALLEL_FUZZ", "30"))
BATCH = 15
SIZES = (1, 1, 2, 3, 4, 5, 6, 8)
SEVERAL = ("split", "split_with_sizes", "chunk", "tensor_split", "unbind")
WRITES = {
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.add_(x.detach().clone()),
    "fill_": lambda x: x.fill_(3.0),
    "copy_": lambda x: x.copy_(x.detach() * 5),
    "[...] =": lambda x: x.__setitem__(..., 7.0),
}


class Views:
    """Arguments of each view function for a tensor of some shape; None where it has none."""

    def __init__(self, rng, x):
        self.rng, self.x, self.shape, self.ndim = rng, x, tuple(x.shape), x.ndim

    def draw(self):
        """A view: name, arguments, and which of several results."""
        names = [name for name in vars(Views) if name not in ("draw", "a_dim", "factors") and name[0] != "_"]
        while True:
            name = self.rng.choice(names)
            args = getattr(self, name)()
            if args is None:
                continue
            name = name.removesuffix("_")
            if name not in SEVERAL:
                return name, args, None
            count = len(getattr(self.x, name)(*args))
            if count:
                return name, args, self.rng.randrange(count)

    def a_dim(self):
        """Any dimension, from the front or the back; its size."""
        d = self.rng.randrange(-self.ndim, self.ndim)
        return d, self.shape[d]

    def factors(self, size):
        """Sizes with this product."""
        found = []
        while size > 1 and len(found) < 2 and self.rng.random() < 0.7:
            found.append(self.rng.choice([f for f in range(1, size + 1) if size % f == 0]))
            size //= found[-1]
        return (*found, size)

    def view(self):
        return (self.factors(math.prod(self.shape)),) if self.x.is_contiguous() else None

    def reshape(self):
        return (self.factors(math.prod(self.shape)),)

    def flatten(self):
        return tuple(sorted(self.rng.choices(range(self.ndim), k=2))) if self.ndim else ()

    def unflatten(self):
        d, size = self.a_dim() if self.ndim else (0, 0)
        return (d, self.factors(size)) if size else None

    def permute(self):
        return (tuple(self.rng.sample(range(self.ndim), self.ndim)),)

    def transpose(self):
        return (self.a_dim()[0], self.a_dim()[0]) if self.ndim else None

    swapaxes = movedim = transpose

    def squeeze(self):
        ones = [d for d, n in enumerate(self.shape) if n == 1]
        return self.rng.choice([(), (self.rng.choice(ones),)]) if ones else None

    def unsqueeze(self):
        return (self.rng.randint(-self.ndim - 1, self.ndim),)

    def expand(self):
        sizes = [self.rng.choice((1, 2, 3)) if n == 1 else n for n in self.shape]
        return ((*self.rng.choice([(), (2,)]), *sizes),)

    broadcast_to = expand

    def narrow(self):
        d, size = self.a_dim() if self.ndim else (0, 0)
        start = self.rng.randint(0, size)
        return (d, start, self.rng.randint(0, size - start)) if self.ndim else None

    def select(self):
        d, size = self.a_dim() if self.ndim else (0, 0)
        return (d, self.rng.randrange(-size, size)) if size else None

    def __getitem__(self, _=None):
        parts = []
        for size in self.shape[: self.rng.randint(0, self.ndim)]:
            start, stop = sorted(self.rng.choices(range(size + 1), k=2))
            ints = [self.rng.randrange(-size, size)] if size else []
            parts += self.rng.choice([[], [None]])
            parts.append(self.rng.choice([slice(None), slice(start, stop), slice(start, stop, 2), *ints]))
        return (tuple(parts),)

    def split(self):
        d, size = self.a_dim() if self.ndim else (0, 0)
        return (self.rng.randint(1, max(size, 1)), d) if self.ndim else None

    chunk = tensor_split = split

    def split_with_sizes(self):
        d, size = self.a_dim() if self.ndim else (0, 0)
        first = self.rng.randint(0, size)
        return ([first, size - first], d) if self.ndim else None

    def unbind(self):
        return (self.a_dim()[0],) if self.ndim else None

    def diagonal(self):
        return (self.rng.randint(-1, 1), *self.rng.sample(range(self.ndim), 2)) if self.ndim > 1 else None

    def unfold(self):
        d, size = self.a_dim() if self.ndim else (0, 0)
        length = self.rng.randint(1, max(size, 1))
        return (d, length, length + self.rng.randint(0, 1)) if size else None


class Chain:
    """One trial: a tensor, its layout, and views of views of it; the same on every rank."""

    def __init__(self, mesh, seed):
        rng = random.Random(seed)
        self.shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 4)))
        self.placed = rng.choice(tensor_placements(self.shape, len(mesh), with_partial=True))
        self.write = rng.choice(list(WRITES))
        self.steps = []
        x = torch.empty(self.shape, device="meta")
        for _ in range(rng.randint(1, 5)):
            step = Views(rng, x).draw()
            x = self.step(step, x)
            if x.numel() < 2000:
                self.steps.append(step)

    def __str__(self):
        steps = [f".{name}{args}" + ("" if which is None else f"[{which}]") for name, args, which in self.steps]
        return f"{self.shape} as {self.placed}: {''.join(steps)}; {self.write}"

    @staticmethod
    def step(step, x):
        name, args, which = step
        found = getattr(x, name)(*args)
        return found if which is None else found[which]

    def run(self, x):
        """A copy of ``x``, and the views of it one after another."""
        views = [x * 1]
        for step in self.steps:
            views.append(self.step(step, views[-1]))
        return views


def is_refused(error):
    """Whether a write was refused as one that would be lost."""
    return isinstance(error, RedistributionError) or "redistributed copy" in str(error)


def check(chain, mesh):
    """Compare one chain in values, gradients, a write to the last view and one to the tensor itself."""
    value = torch.randn(chain.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = value.clone().requires_grad_()
    x = make(value, mesh, chain.placed.layout(mesh, value.ndim), requires_grad=True)

    def compare(got, want):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.detach().full_tensor(), other.detach())

    want, got = chain.run(plain), chain.run(x)
    compare(got, want)
    for view in (want[-1], got[-1]):
        (view * view).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)

    x.grad = plain.grad = None
    want, got = chain.run(plain), chain.run(x)
    if is_written(want, chain.write, lambda error: True) and is_written(got, chain.write, is_refused):
        compare(got, want)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)

    want, got = chain.run(plain.detach()), chain.run(x.detach())
    if is_written(got[:1], "mul_", is_refused):
        WRITES["mul_"](want[0])
        compare(got, want)


def is_written(views, name, may_raise):
    """Write to the last view, and take the gradient of the tensor; False where that is refused, as PyTorch refuses it
    for memory that overlaps and for results of ``split``."""
    try:
        WRITES[name](views[-1])
        if views[0].requires_grad:
            views[0].square().sum().backward()
    except RuntimeError as error:
        if not may_raise(error):
            raise
        return False
    return True


def check_many(shape, seeds):
    """What differs, and how many chains the default policy refused."""
    found, refused = [], 0
    for seed in seeds:
        chain = Chain(shape, seed)
        for policy in ("partial", "auto"):
            try:
                with redistribute_policy(policy):
                    check(chain, mesh_of(shape))
            except Exception as error:
                if policy != "auto" and isinstance(error, RedistributionError):
                    refused += 1
                else:
                    found.append(f"seed {seed}, {policy}: {chain}\n{''.join(traceback.format_exception(error)[-3:])}")
    return found, refused


@pytest.mark.parametrize("start", range(0, COUNT, BATCH))
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_random_chains_of_views(ranks, shape, start):
    by_rank = ranks(4, check_many, shape, range(start, min(start + BATCH, COUNT)), timeout=300)
    assert not any(found for found, _ in by_rank), "\n".join(by_rank[0][0][:3])
    assert all(refused < BATCH / 2 for _, refused in by_rank)
