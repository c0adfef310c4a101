"""Running sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.boxes import dim_intervals
from hyper_parallel.call import Call, normal_dim
from hyper_parallel.families.over_axes import OverAxes
from hyper_parallel.layout import Layout
from hyper_parallel.placements import PackedShard, Partial
from hyper_parallel.strategy import S, Strategy, StrategyOp


class CumSum(StrategyOp):
    """``cumsum``; linear, so a pending sum passes.

    A sharded dim: the ranks' totals are gathered (one all-gather of one slice per rank; one reduce-scatter backward),
    and each rank adds those before it.
    """

    signature = "input, dim, *, dtype=None"

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        return [tuple(call.inputs[0].shape)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        dim = normal_dim(call.arg("dim"), len(call.inputs[0].shape))
        layout = call.inputs[0].layout
        for d in range(layout.ndim):
            packed = any(isinstance(layout.placements[a], PackedShard) for a in layout.shard_order[d])
            if d != dim or not packed:  # the pieces of a packed dim do not follow one another
                yield Strategy([S(d)], S(d))
        yield Strategy([Partial()], Partial())

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dim = normal_dim(call.arg("dim"), len(call.inputs[0].shape))
        over = OverAxes(targets[0], [dim] if targets[0].ndim else [])
        if not over:
            return None
        earlier = _earlier(over, call.inputs[0].shape, dim)

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            sums = call.func(x, *args, **kwargs)
            totals = over.gather(x.sum(dim, dtype=sums.dtype), varying=True)
            before = totals[torch.tensor(earlier, dtype=torch.int64, device=x.device)].sum(0)
            return sums + before.unsqueeze(dim)

        return local


def _earlier(over: OverAxes, shape: Sequence[int], dim: int) -> list[int]:
    """Which of the ranks along ``over`` hold indices before this rank's."""
    group = over.layout.info.group(over.axes)
    starts = [dim_intervals(over.layout, tuple(shape), dim, c) for c in group.coordinates]
    mine = starts[group.rank]
    coordinates = sorted(group.coordinates)
    places = {c: i for i, c in enumerate(coordinates)}
    return [
        places[c]
        for c, held in zip(group.coordinates, starts, strict=True)
        if held and mine and held[0][0] < mine[0][0]
    ]
