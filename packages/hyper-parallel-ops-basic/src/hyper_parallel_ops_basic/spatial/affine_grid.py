"""``F.affine_grid``: the points at which ``F.grid_sample`` reads images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, S


class AffineGrid(StrategyOp):
    """``affine_grid(theta, size)``: a grid per sample."""

    summary = OpSummary(
        "samples",
        whole="the matrices: every point of a grid is a product with all of one",
    )

    signature = "theta, size, align_corners=None"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield Strategy({"theta": S(0)}, S(0))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if not targets[0].shard_order[0]:
            return None
        func, (_, *image), align = call.func, call.arg("size"), call.arg("align_corners")

        def local(theta: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # One sample more, as no sample is none that the function takes.
            more = torch.cat([theta, theta.new_zeros(1, *theta.shape[1:])])
            return func(more, [len(more), *image], align)[:-1]

        return local
