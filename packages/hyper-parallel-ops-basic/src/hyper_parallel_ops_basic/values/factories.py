"""New tensors made after the model of one: ``zeros_like``, ``new_zeros`` and so on.

They read only shape, dtype and device. The result lies like the model along each dim of the same size, with Replicate
in the place of a pending reduction, unless its memory comes as it is (``empty_like``; ``new_empty`` of the same shape):
what is written there next may be pending as the model is. ``x.new_empty(*x.shape[:-1], n)``, into which parts of x's
layout are then written, keeps the shards of the other dims. With another number of dims it is Replicate. It never
depends on the model's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Replicate
from hyper_parallel.rules import Call, LayoutOp, OpSummary, Solution, local_shape


def settled(layout: Layout) -> Layout:
    """The layout with Replicate where it is pending."""
    return layout.with_placements({a: Replicate() for a, p in enumerate(layout.placements) if isinstance(p, Partial)})


class Like(LayoutOp):
    """``zeros_like``, ``ones_like``, ``full_like``."""

    summary = OpSummary(
        "every dim, like the model",
        pending="becomes whole",
    )

    scalars_matter = False

    def solve(self, call: Call) -> Solution:
        layout = call.inputs[0].layout
        return Solution([s.layout for s in call.inputs], [settled(layout)], uncounted=frozenset([0]))


class EmptyLike(Like):
    """``empty_like``."""

    summary = OpSummary(
        "every dim, like the model",
        pending="stays: the memory is written next",
    )

    def solve(self, call: Call) -> Solution:
        targets = [s.layout for s in call.inputs]
        return Solution(targets, [targets[0]], uncounted=frozenset([0]))


class NewOfSize(LayoutOp):
    """``x.new_zeros(*size)``, ``new_ones``, ``new_full(size, value)``."""

    summary = OpSummary(
        "like the model where it has its shape, else whole",
        pending="becomes whole",
    )
    keeps_pending = False

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
        if self.keeps_pending and shape == tuple(spec.shape):
            layout = spec.layout
        sizes = local_shape(layout, shape, layout.info.my_coordinate())
        return Solution(targets, [layout], _of_size(call, sizes), uncounted=frozenset([0]))


class NewEmpty(NewOfSize):
    """``x.new_empty(*size)`` and ``x.new_empty_strided(size, stride)``; one with gaps or overlaps is whole, so that its
    memory is as asked for."""

    summary = OpSummary(
        "like the model where it has its shape, else whole",
        pending="stays where the model has its shape: the memory is written next",
    )
    keeps_pending = True

    def solve(self, call: Call) -> Solution:
        made = call.meta_result()
        if made.stride() == torch.empty_like(made).stride():
            return super().solve(call)
        layout = call.inputs[0].layout
        return Solution([layout], [layout.replicated(made.ndim)], uncounted=frozenset([0]))


def _of_size(call: Call, sizes: tuple[int, ...]) -> Callable[..., Any] | None:
    func = call.func
    if call.name == "new_full":
        return lambda x, size=None, fill_value=None, **kwargs: func(x, sizes, fill_value, **kwargs)

    if call.name == "new_empty_strided":  # the engine lays the dims in memory in the order of the global stride
        return lambda x, size=None, stride=None, **kwargs: x.new_empty(sizes, **kwargs)

    def make(x: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("size", None)
        return func(x, sizes, **kwargs)

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
