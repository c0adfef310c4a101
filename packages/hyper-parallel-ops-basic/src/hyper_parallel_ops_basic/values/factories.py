"""New tensors made after the model of one: ``zeros_like``, ``new_zeros`` and so on.

They read only shape, dtype and device. The result lies like the model along each dim of the same size, with Replicate
in the place of a pending reduction: ``x.new_empty(*x.shape[:-1], n)``, into which parts of x's layout are then written,
keeps the shards of the other dims. With another number of dims it is Replicate. It never depends on the model's
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Replicate
from hyper_parallel.rules import Call, LayoutOp, OpSummary, Solution, in_memory_order, local_shape, memory_order


def settled(layout: Layout) -> Layout:
    """The layout with Replicate where it is pending."""
    return layout.with_placements({a: Replicate() for a, p in enumerate(layout.placements) if isinstance(p, Partial)})


class Like(LayoutOp):
    """``zeros_like``, ``ones_like``, ``full_like``, ``empty_like``."""

    summary = OpSummary(
        "every dim, like the model",
        pending="becomes whole",
    )

    scalars_matter = False

    def solve(self, call: Call) -> Solution:
        layout = call.inputs[0].layout
        return Solution([s.layout for s in call.inputs], [settled(layout)], uncounted=frozenset([0]))


class NewOfSize(LayoutOp):
    """``x.new_zeros(*size)``, ``new_ones``, ``new_empty``, ``new_full(size, value)``, ``new_empty_strided``."""

    summary = OpSummary(
        "like the model where it has its shape, else whole",
        pending="becomes whole",
    )

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        (shape,) = call.output_shapes()
        targets = [s.layout for s in call.inputs]
        if len(shape) != len(spec.shape):
            return Solution(targets, [spec.layout.replicated(len(shape))], uncounted=frozenset([0]))
        other = (d for d, n in enumerate(shape) if n != spec.shape[d])
        layout = settled(spec.layout).with_placements(
            {a: Replicate() for d in other for a in spec.layout.shard_order[d]}
        )
        sizes = local_shape(layout, shape, layout.info.my_coordinate())
        return Solution(targets, [layout], _of_size(call, sizes), uncounted=frozenset([0]))


def _of_size(call: Call, sizes: tuple[int, ...]) -> Callable[..., Any] | None:
    func = call.func
    if call.name == "new_full":
        return lambda x, size=None, fill_value=None, **kwargs: func(x, sizes, fill_value, **kwargs)

    if call.name == "new_empty_strided":
        return _strided(call, sizes)

    def make(x: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("size", None)
        return func(x, sizes, **kwargs)

    return make


def _strided(call: Call, sizes: tuple[int, ...]) -> Callable[..., Any]:
    """``new_empty_strided``: the piece has its dims in memory in the order that the strides say."""
    whole = call.meta_result()
    order = memory_order(whole.stride())
    if not torch.empty_like(whole).stride() == whole.stride():
        raise ValueError(
            f"new_empty_strided: strides {whole.stride()} of a DTensor of shape {tuple(whole.shape)} leave gaps or "
            f"overlap, which its pieces cannot; without, in the same order: {torch.empty_like(whole).stride()}"
        )

    def make(x: Any, size: Any, stride: Any, **kwargs: Any) -> Any:
        return in_memory_order(x.new_empty(sizes, **kwargs), order)

    return make


class NewTensor(LayoutOp):
    """``x.new_tensor(data)``: every rank has the data."""

    summary = OpSummary(
        "none: every rank has the data",
        pending="becomes whole",
    )

    scalars_matter = False

    def solve(self, call: Call) -> Solution:
        (shape,) = call.output_shapes()
        spec = call.inputs[0]
        layout = spec.layout.replicated(len(shape))
        return Solution([spec.layout], [layout], uncounted=frozenset([0]))
