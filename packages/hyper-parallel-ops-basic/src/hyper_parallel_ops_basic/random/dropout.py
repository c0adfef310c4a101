"""Dropout: the mask is the one that one device with the same seed would draw, for any layout.

Every rank draws the mask of the whole tensor and keeps its part; see :mod:`hyper_parallel.tensor.random`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Strategy, StrategyOp
from hyper_parallel.rules import Call, LayoutOp, OpSummary, S, Solution, draw
from hyper_parallel_ops_basic.values.factories import settled


def ones_of(call: Call, device: torch.device) -> torch.Tensor:
    """A tensor of ones with the first input's global shape and memory order, which decides who gets which number."""
    spec = call.inputs[0]
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).fill_(1)


class Dropout(LayoutOp):
    """``dropout``, and ``dropout1d`` to ``dropout3d``, which drop whole channels.

    Multiplication by a mask that all ranks agree on is linear, so a pending sum stays pending.
    """

    summary = OpSummary(
        "every dim",
        pending="passes",
    )

    signature = "input, p=0.5, training=True, inplace=False, *, train"

    def solve(self, call: Call) -> Solution:
        layout = call.inputs[0].layout
        products = {a for a, p in enumerate(layout.placements) if isinstance(p, Partial) and p.reduce_op == "product"}
        target = settled(layout) if products else layout
        mask_layout, func, arguments = settled(target), call.func, self.arguments
        shape = tuple(call.inputs[0].shape)

        def drop(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = arguments.bind(args, kwargs)
            x, p = bound["input"], bound.get("p", 0.5)
            if not bound.get("training", bound.get("train", True)) or p == 0:
                return func(*args, **kwargs)
            mask = draw(mask_layout, shape, lambda: func(ones_of(call, x.device), p, True))
            if x.device.type != "cpu" and x.dtype.itemsize < 4:
                # Fused kernels scale in float32: a mask of this dtype would round the scale.
                out = (x.float() * (mask != 0).float().mul_(1 / (1 - p) if p < 1 else 0)).to(x.dtype)
                return x.copy_(out) if call.inplace or bound.get("inplace") else out
            return x.mul_(mask) if call.inplace or bound.get("inplace") else x * mask

        return Solution([target], [target], drop)


class AlphaDropout(StrategyOp):
    """``alpha_dropout`` and ``feature_alpha_dropout``, which keep mean and variance of a SELU network."""

    summary = OpSummary(
        "every dim",
    )

    signature = "input, p=0.5, training=False, inplace=False, *, train"

    def __init__(self, op_name: str, *, whole_features: bool = False) -> None:
        super().__init__(op_name)
        self.whole_features = whole_features

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.inputs[0].shape)):
            yield Strategy([S(d)], S(d))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        func, layout, shape, arguments = call.func, targets[0], tuple(call.inputs[0].shape), self.arguments
        whole_features = self.whole_features

        def drop(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = arguments.bind(args, kwargs)
            x, p = bound["input"], bound.get("p", 0.5)
            if not bound.get("training", bound.get("train", False)) or p in (0, 1):
                return func(*args, **kwargs)

            def noise() -> torch.Tensor:
                ones = ones_of(call, x.device)
                if not whole_features:
                    return torch.empty_like(ones).bernoulli_(1 - p)
                return ones.new_empty([n if d < 2 else 1 for d, n in enumerate(shape)]).bernoulli_(1 - p).expand(shape)

            kept = draw(layout, shape, noise)
            alpha = 1.7580993408473766
            a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
            shift = kept.add(-1).mul_(alpha * a).add_(alpha * a * p)
            out = x.mul(kept.mul(a)).add_(shift)
            return x.copy_(out) if bound.get("inplace") else out

        return drop
