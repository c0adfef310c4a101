"""The operations of random programs: each draws its arguments for tensors at hand, and runs on plain tensors and on
DTensors alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import DTensor
from hyper_parallel.testing.layouts import tensor_placements

Pool = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One call of a program.

    Attributes:
        text: for people; ``$3`` is the fourth value of the program.
        inputs: which values it takes.
        run: gives one tensor, or a tuple of them.
        in_place: whether it writes its first input, which then is no leaf.
    """

    text: str
    inputs: tuple[int, ...]
    run: Callable[..., Any]
    in_place: bool = False


class Draw:
    """Random choices among the values of a program."""

    def __init__(self, seed: int, mesh_ndim: int) -> None:
        self.random, self.mesh_ndim = random.Random(seed), mesh_ndim

    def value(self, pool: Pool, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> int | None:
        """The place of a value that fits; the later ones are likelier, so that programs grow deep."""
        places = [i for i, t in enumerate(pool) if fits(t)]
        return self.random.choices(places, weights=range(1, len(places) + 1))[0] if places else None

    def dim(self, t: torch.Tensor) -> int:
        """A dim of a tensor, from either end."""
        return self.random.randrange(-t.ndim, t.ndim)

    def tensor(self, shape: Sequence[int], low: float = -1, high: float = 1) -> torch.Tensor:
        """A new float64 tensor that depends on the seed only."""
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.empty(tuple(shape), dtype=torch.float64).uniform_(low, high, generator=generator)

    def ids(self, shape: Sequence[int], below: int) -> torch.Tensor:
        """New indices."""
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randint(0, below, tuple(shape), generator=generator)


Operation = Callable[[Draw, Pool], "Step | None"]
OPERATIONS: list[Operation] = []


def operation(function: Operation) -> Operation:
    """Let programs use it."""
    OPERATIONS.append(function)
    return function


def beside(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A plain tensor that every rank has, as what it meets: Replicate beside a DTensor."""
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(value, like.layout.replicated(value.ndim))


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def has_dims(count: int) -> Callable[[torch.Tensor], bool]:
    return lambda t: is_float(t) and t.ndim >= count and t.numel() > 0


def is_distinct(t: torch.Tensor) -> bool:
    """Whether no two elements are nearly equal: which of equal ones comes first, or gets a gradient, is not defined."""
    ordered = t.detach().flatten().sort().values
    return bool((ordered.diff() > 1e-6).all())


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "neg": torch.neg, "abs": torch.abs,
    "exp of tanh": lambda t: t.tanh().exp(), "sqrt of abs + 1": lambda t: (t.abs() + 1).sqrt(), "silu": F.silu,
    "gelu": F.gelu, "square": torch.square, "clone": torch.clone, "contiguous": lambda t: t.contiguous(),
    "to itself": lambda t: t.to(t.dtype), "float and back": lambda t: t.float().double(), "* 2": lambda t: t * 2,
    "2 -": lambda t: 2 - t, "clamp": lambda t: t.clamp(-0.5, 0.8), "leaky_relu": F.leaky_relu, "erf": torch.erf,
    "nan_to_num": torch.nan_to_num, "detach": lambda t: t.detach(), "zeros_like": torch.zeros_like,
}  # fmt: skip


@operation
def unary(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, is_float)
    name = draw.random.choice(list(UNARY))
    return None if at is None else Step(f"{name}(${at})", (at,), UNARY[name])


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum,
    "div": lambda a, b: a / (b.abs() + 1), "lerp": lambda a, b: torch.lerp(a, b, 0.3), "atan2": torch.atan2,
    "where": lambda a, b: torch.where(a > b, a, b), "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
}  # fmt: skip


def broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


@operation
def binary(draw: Draw, pool: Pool) -> Step | None:
    a = draw.value(pool, is_float)
    if a is None:
        return None
    b = draw.value(pool, lambda t: is_float(t) and broadcasts(pool[a], t))
    name = draw.random.choice(list(BINARY))
    return None if b is None else Step(f"{name}(${a}, ${b})", (a, b), BINARY[name])


@operation
def with_constant(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, is_float)
    if at is None:
        return None
    shape = [n if draw.random.random() < 0.6 else 1 for n in pool[at].shape]
    constant, name = draw.tensor(shape), draw.random.choice(list(BINARY))
    return Step(f"{name}(${at}, {shape})", (at,), lambda t: BINARY[name](t, beside(t, constant)))


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin, "logsumexp": torch.logsumexp,
    "var": lambda t, dim, keepdim: torch.var(t, dim, correction=0, keepdim=keepdim), "norm": torch.linalg.vector_norm,
    "prod": lambda t, dim, keepdim: torch.prod(t, dim, keepdim=keepdim),
    "max": lambda t, dim, keepdim: torch.max(t, dim, keepdim=keepdim).values,
    "median": lambda t, dim, keepdim: torch.median(t, dim, keepdim=keepdim).values,
    "any": lambda t, dim, keepdim: (t > 0.5).any(dim, keepdim=keepdim), "argmax": torch.argmax,
}  # fmt: skip
ORDERED = ("max", "median", "argmax", "sort", "cummax", "argsort")


@operation
def reduction(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, has_dims(1))
    if at is None:
        return None
    name, dim, keep = draw.random.choice(list(REDUCTIONS)), draw.dim(pool[at]), draw.random.random() < 0.5
    if name in ORDERED and not is_distinct(pool[at]):
        return None
    return Step(f"{name}(${at}, {dim}, {keep})", (at,), lambda t: REDUCTIONS[name](t, dim, keepdim=keep))


ALONG: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "softmax": torch.softmax, "log_softmax": torch.log_softmax, "cumsum": torch.cumsum, "flip": torch.flip,
    "cumprod": torch.cumprod, "sort": lambda t, d: torch.sort(t, d).values, "roll": lambda t, d: t.roll(1, d),
    "logcumsumexp": torch.logcumsumexp, "unsqueeze": lambda t, d: t.unsqueeze(d), "diff": lambda t, d: t.diff(dim=d),
    "cummax": lambda t, d: t.cummax(d).values, "normalize": lambda t, d: F.normalize(t, dim=d),
    "argsort": lambda t, d: t.argsort(d), "repeat": lambda t, d: t.repeat_interleave(2, d),
}  # fmt: skip


@operation
def along(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, has_dims(1))
    if at is None:
        return None
    name, dim = draw.random.choice(list(ALONG)), draw.dim(pool[at])
    if name in ORDERED and not is_distinct(pool[at]):
        return None
    return Step(f"{name}(${at}, {dim})", (at,), lambda t: ALONG[name](t, dim))


@operation
def matmul(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, has_dims(2))
    if at is None:
        return None
    weight = draw.tensor((pool[at].shape[-1], draw.random.choice([3, 4, 8])))
    if draw.random.random() < 0.5:
        return Step(f"${at} @ {tuple(weight.shape)}", (at,), lambda t: t @ beside(t, weight))
    return Step(f"linear(${at}, {tuple(weight.T.shape)})", (at,), lambda t: F.linear(t, beside(t, weight.T)))


@operation
def product(draw: Draw, pool: Pool) -> Step | None:
    a = draw.value(pool, has_dims(2))
    if a is None:
        return None
    b = draw.value(pool, lambda t: has_dims(2)(t) and t.ndim == pool[a].ndim and t.shape[:-2] == pool[a].shape[:-2]
                   and t.shape[-1] == pool[a].shape[-1])  # fmt: skip
    return None if b is None else Step(f"${a} @ ${b}.mT", (a, b), lambda x, y: x @ y.mT)


@operation
def norm(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, has_dims(1))
    if at is None:
        return None
    size = pool[at].shape[-1:]
    if draw.random.random() < 0.5:
        return Step(f"layer_norm(${at})", (at,), lambda t: F.layer_norm(t, size))
    weight = draw.tensor(size)
    return Step(f"rms_norm(${at}, {tuple(size)})", (at,), lambda t: F.rms_norm(t, size, beside(t, weight)))


@operation
def rearrange(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, lambda t: t.ndim >= 2)
    if at is None:
        return None
    a, b = draw.dim(pool[at]), draw.dim(pool[at])
    kind = draw.random.choice(["transpose", "permute", "flatten", "movedim", "mT"])
    order = draw.random.sample(range(pool[at].ndim), pool[at].ndim)
    first = draw.random.randrange(pool[at].ndim - 1)
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transpose": lambda t: t.transpose(a, b), "permute": lambda t: t.permute(order),
        "flatten": lambda t: t.flatten(first, first + 1), "movedim": lambda t: t.movedim(a, b), "mT": lambda t: t.mT,
    }  # fmt: skip
    return Step(f"{kind}(${at}: {a}, {b}, {order}, {first})", (at,), forms[kind])


@operation
def reshape(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, lambda t: t.ndim >= 1 and t.numel() > 1)
    if at is None:
        return None
    dim = draw.random.randrange(pool[at].ndim)
    size = pool[at].shape[dim]
    factors = [n for n in range(1, size + 1) if size % n == 0]
    if not factors:
        return None
    outer = draw.random.choice(factors)
    whole = [*pool[at].shape[:dim], outer, -1, *pool[at].shape[dim + 1 :]]
    if 0 in pool[at].shape:
        return None
    if draw.random.random() < 0.5:
        return Step(f"reshape(${at}, {whole})", (at,), lambda t: t.reshape(whole))
    return Step(f"unflatten(${at}, {dim}, {outer})", (at,), lambda t: t.unflatten(dim, (outer, -1)))


@operation
def piece(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, lambda t: t.ndim >= 1 and t.numel() > 0)
    if at is None:
        return None
    dim = draw.random.randrange(pool[at].ndim)
    size = pool[at].shape[dim]
    start = draw.random.randrange(size)
    stop, step = draw.random.randint(start + 1, size), draw.random.choice([1, 1, 2])
    cut: tuple[Any, ...] = (slice(None),) * dim
    cut += (draw.random.choice([slice(start, stop, step), start, slice(None, stop)]),)
    return Step(f"${at}[{cut}]", (at,), lambda t: t[cut])


@operation
def split(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, lambda t: t.ndim >= 1 and t.numel() > 0)
    if at is None:
        return None
    dim = draw.random.randrange(pool[at].ndim)
    if draw.random.random() < 0.5:
        return Step(f"chunk(${at}, 2, {dim})", (at,), lambda t: t.chunk(2, dim))
    size = draw.random.randint(1, pool[at].shape[dim])
    return Step(f"split(${at}, {size}, {dim})[:2]", (at,), lambda t: t.split(size, dim)[:2])


@operation
def join(draw: Draw, pool: Pool) -> Step | None:
    a = draw.value(pool, has_dims(1))
    if a is None:
        return None
    dim = draw.random.randrange(pool[a].ndim)

    def fits(t: torch.Tensor) -> bool:
        same = all(m == n for d, (m, n) in enumerate(zip(t.shape, pool[a].shape, strict=False)) if d != dim)
        return is_float(t) and t.ndim == pool[a].ndim and same and t.dtype == pool[a].dtype

    b = draw.value(pool, fits)
    if b is None:
        return None
    if pool[a].shape == pool[b].shape and draw.random.random() < 0.5:
        return Step(f"stack([${a}, ${b}], {dim})", (a, b), lambda x, y: torch.stack([x, y], dim))
    return Step(f"cat([${a}, ${b}], {dim})", (a, b), lambda x, y: torch.cat([x, y], dim))


@operation
def by_index(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, has_dims(1))
    if at is None:
        return None
    t = pool[at]
    dim = draw.random.randrange(t.ndim)
    ids = draw.ids((draw.random.randint(1, 5),), t.shape[dim])
    wide = draw.ids([draw.random.randint(1, 3) if d == dim else n for d, n in enumerate(t.shape)], t.shape[dim])
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "index_select": lambda t: t.index_select(dim, beside(t, ids)),
        "gather": lambda t: t.gather(dim, beside(t, wide)),
        "take_along_dim": lambda t: t.take_along_dim(beside(t, wide), dim),
        "index_add": lambda t: t.index_add(dim, beside(t, ids), t.index_select(dim, beside(t, ids))),
        "scatter_add": lambda t: t.scatter_add(dim, beside(t, wide), t.gather(dim, beside(t, wide)) * 2),
        "index_fill": lambda t: t.index_fill(dim, beside(t, ids), 0.25),
        "x[ids]": lambda t: t[(slice(None),) * dim + (beside(t, ids),)],
    }
    name = draw.random.choice(list(forms))
    return Step(f"{name}(${at}, {dim}, {ids.tolist()})", (at,), forms[name])


@operation
def masked(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, is_float)
    return None if at is None else Step(f"masked_fill(${at})", (at,), lambda t: t.masked_fill(t > 0.3, 0.1))


@operation
def write(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, lambda t: is_float(t) and not t.is_leaf and t.numel() > 0)
    if at is None:
        return None
    shape = pool[at].shape
    constant, cut = draw.tensor([n if draw.random.random() < 0.5 else 1 for n in shape]), slice(0, 1)
    forms: dict[str, Callable[[torch.Tensor], Any]] = {
        "add_": lambda t: t.add_(0.5), "mul_": lambda t: t.mul_(beside(t, constant)), "zero_": lambda t: t.zero_(),
        "relu_": lambda t: t.relu_(), "copy_": lambda t: t.copy_(beside(t, constant)),
        "masked_fill_": lambda t: t.masked_fill_(t > 0, 0.5), "clamp_": lambda t: t.clamp_(-0.5, 0.5),
    }  # fmt: skip
    if len(shape):
        forms["x[:1] = 1"] = lambda t: t.__setitem__(cut, 1.0)
        forms["x[:1] *= 2"] = lambda t: t[:1].mul_(2)
    name = draw.random.choice(list(forms))
    return Step(f"{name}(${at})", (at,), forms[name], in_place=True)


@operation
def pad(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, has_dims(1))
    return None if at is None else Step(f"pad(${at}, (1, 2))", (at,), lambda t: F.pad(t, (1, 2), value=0.5))


@operation
def top(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, lambda t: has_dims(1)(t) and is_distinct(t))
    if at is None:
        return None
    dim = draw.dim(pool[at])
    k = draw.random.randint(1, pool[at].shape[dim])
    return Step(f"topk(${at}, {k}, {dim})", (at,), lambda t: tuple(t.topk(k, dim)))


@operation
def loss(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, lambda t: is_float(t) and t.ndim == 2 and t.numel() > 0)
    if at is None:
        return None
    target = draw.ids(pool[at].shape[:1], pool[at].shape[1])
    how = draw.random.choice(["mean", "sum", "none"])
    return Step(f"cross_entropy(${at}, {how})", (at,), lambda t: F.cross_entropy(t, beside(t, target), reduction=how))


@operation
def expand(draw: Draw, pool: Pool) -> Step | None:
    at = draw.value(pool, lambda t: 1 in t.shape or t.ndim == 0)
    if at is None:
        return None
    shape = [3 if n == 1 else n for n in pool[at].shape]
    return Step(f"expand(${at}, {[2, *shape]})", (at,), lambda t: t.expand(2, *shape))


@operation
def redistribute(draw: Draw, pool: Pool) -> Step | None:
    """Plain tensors are cloned too: a write to the result reaches the input of neither."""
    at = draw.value(pool, is_float)
    if at is None:
        return None
    placed = draw.random.choice(tensor_placements(pool[at].shape, draw.mesh_ndim, with_partial=True))

    def run(t: torch.Tensor) -> torch.Tensor:
        moved = t.redistribute(placed.layout(t.device_mesh, t.ndim)) if isinstance(t, DTensor) else t
        return moved.clone()

    return Step(f"redistribute(${at}, {placed})", (at,), run)
