"""Sample inputs of an operator: what an author writes, and the values that are drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.sharding.placements import is_partial
from hyper_parallel.torch_compat import pytree

if TYPE_CHECKING:
    from hyper_parallel.sharding.layout import Layout

Unsupported = Callable[[Sequence["Layout"]], bool]
MaxCollectives = Mapping[str, int] | Callable[[Sequence["Layout"]], Mapping[str, int]]


@dataclass(frozen=True)
class AtMost:
    """Made by :func:`at_most`."""

    inside: Mapping[str, int]

    def __call__(self, layouts: Sequence[Layout]) -> Mapping[str, int]:
        pending = sum(is_partial(p) for layout in layouts for p in layout.placements)
        reductions = {name: self.inside.get(name, 0) + pending for name in ("all_reduce", "reduce_scatter")}
        return {**self.inside, **reductions}


def at_most(**inside: int) -> AtMost:
    """``max_collectives`` of an operator that communicates this inside, ``at_most(all_reduce=2)``, and nothing else but
    what carries out pending inputs: one all-reduce or reduce-scatter for each."""
    return AtMost(inside)


@dataclass(frozen=True)
class TensorInput:
    """A tensor argument whose values the kit draws; made by :func:`tensor`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float | None
    high: float | None
    grad: bool

    def draw(self, seed: int) -> torch.Tensor:
        """The values for one seed."""
        generator = torch.Generator().manual_seed(seed)
        if self.dtype is torch.bool:
            return torch.randint(0, 2, self.shape, generator=generator).bool()
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            first, stop = 0 if self.low is None else int(self.low), 5 if self.high is None else int(self.high)
            return torch.randint(first, stop, self.shape, generator=generator, dtype=self.dtype)
        if self.low is None and self.high is None:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        low, high = self.low or 0.0, 1.0 if self.high is None else self.high
        return torch.rand(self.shape, generator=generator, dtype=self.dtype) * (high - low) + low

    def expression(self, seed: int) -> str:
        """Python source that gives the same values."""
        parts = [*map(repr, self.shape), f"dtype={self.dtype}"]
        parts += [f"{name}={value}" for name in ("low", "high") if (value := getattr(self, name)) is not None]
        return f"tensor({', '.join(parts)}).draw({seed})"


def tensor(
    *shape: int,
    dtype: torch.dtype = torch.float64,
    low: float | None = None,
    high: float | None = None,
    grad: bool | None = None,
) -> TensorInput:
    """A tensor argument of this global shape.

    Args:
        shape: global shape; none for a 0-dim tensor.
        dtype: float64 by default, so that a wrong term is not lost in rounding.
        low, high: range of the values, ``high`` excluded. Floats are normal without them, integers lie in [0, 5).
        grad: whether gradients are checked; by default for floating dtypes.
    """
    wants = (dtype.is_floating_point or dtype.is_complex) if grad is None else grad
    return TensorInput(tuple(shape), dtype, low, high, wants)


@dataclass(frozen=True)
class Sample:
    """One call of an operator on global tensors; made by :func:`sample`.

    Attributes:
        args, kwargs: as the operator takes them, with :class:`TensorInput` or plain tensors where tensors go.
        name: for the test id; by default made from the arguments.
        gap: reason why this sample is known to fail (a strict xfail).
        unsupported: given the layouts of the tensor inputs, whether the operator must refuse them.
        max_collectives: how often each collective may run in the forward, or a function that says so for the layouts of
            the tensor inputs.
        no_gradcheck: reason why the operator's gradient is not compared with differences on one device.
        no_opcheck: reason why its custom operators are not given to ``torch.library.opcheck``.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str | None = None
    gap: str | None = None
    unsupported: Unsupported | None = None
    max_collectives: MaxCollectives | None = None
    no_gradcheck: str | None = None
    no_opcheck: str | None = None
    tensors: list[TensorInput | torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        object.__setattr__(self, "tensors", [leaf for leaf in leaves if _is_tensor(leaf)])

    def options(self, **changes: Any) -> Sample:
        """The same call with some of the attributes set: ``name``, ``gap``, ``unsupported`` and so on."""
        return replace(self, **changes)

    @property
    def id(self) -> str:
        """Short text for a test id."""
        return self.name or "-".join(filter(None, map(_short, [*self.args, *self.kwargs.values()]))) or "no_arguments"

    def values(self) -> list[torch.Tensor]:
        """The global values of the tensor arguments, in order; the same on every call."""
        return [t.draw(seed) if isinstance(t, TensorInput) else t for seed, t in enumerate(self.tensors)]

    def wants_grad(self) -> list[bool]:
        """Which tensor arguments have gradients to check."""
        return [t.grad if isinstance(t, TensorInput) else t.is_floating_point() for t in self.tensors]

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args`` and ``kwargs`` with these in the place of the tensor arguments."""
        leaves, structure = pytree.tree_flatten((self.args, dict(self.kwargs)))
        given = iter(tensors)
        filled = [next(given) if _is_tensor(leaf) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return args, kwargs


def sample(*args: Any, **kwargs: Any) -> Sample:
    """One call of the operator under test: ``sample(tensor(4, 6), dim=-1)``.

    Give shapes that do not divide by the number of ranks (5, 3, 1) as well: that is how uneven and empty shards come
    about. See :meth:`Sample.options` for what can be declared about a sample.
    """
    return Sample(args, kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (TensorInput, torch.Tensor))


def _short(value: Any) -> str:
    if _is_tensor(value):
        dtype = "" if value.dtype is torch.float64 else f"_{str(value.dtype).removeprefix('torch.')}"
        return ("x".join(map(str, value.shape)) or "scalar") + dtype
    if isinstance(value, (list, tuple)):
        return ",".join(filter(None, map(_short, value)))
    text = str(value).removeprefix("torch.")
    return text if len(text) <= 24 and text.isascii() else type(value).__name__
