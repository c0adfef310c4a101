"""Running sums, products and extremes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, PackedShard, Partial, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    OpSummary,
    OverAxes,
    S,
    dim_intervals,
    global_indices,
    keeps_sums,
    normal_dim,
    overwrite,
)
from hyper_parallel_ops_basic.reduction.min_max import neutral


class Scan(StrategyOp):
    """``cumsum``, ``cumprod``, ``logcumsumexp``: running results along a dim.

    A sharded dim: the ranks' totals are gathered (one all-gather of one slice per rank; one reduce-scatter backward),
    and each rank joins those before it to its own running result.

    Args:
        total: function of ``(x, dim)`` that gives a rank's total (``sum``).
        join: function of two running results (``add``).
        linear: whether a pending sum passes.
    """

    summary = OpSummary(
        "every dim",
        pending="passes where linear (`cumsum`)",
        communicates="sharded scanned dim: 1 all-gather of one slice per rank | 1 reduce-scatter",
        whole="a packed dim, whose pieces do not follow one another",
    )

    signature = "input, dim, *, dtype=None"

    def __init__(self, op_name: str, *, total: str, join: str, linear: bool = False) -> None:
        super().__init__(op_name)
        self.total, self.join, self.linear = getattr(torch, total), getattr(torch, join), linear

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        return [tuple(call.inputs[0].shape)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield from scan_rows(call)
        if self.linear and keeps_sums(call):
            yield Strategy([Partial()], Partial())

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dim = normal_dim(call.arg("dim"), len(call.inputs[0].shape))
        over = OverAxes(targets[0], [dim] if targets[0].ndim else [])
        if not over:
            return None
        earlier = _earlier(over, call.inputs[0].shape, dim)
        run, total, join = getattr(torch, call.name.rstrip("_")), self.total, self.join

        def scan(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            running = run(x, *args, **kwargs)
            totals = over.gather(total(x.to(running.dtype), dim), varying=True)
            before = totals[torch.tensor(earlier, dtype=torch.int64, device=x.device)]
            # Also where none is before, so that every rank takes part in the backward: the sum of nothing.
            offset = (total(before, 0) if earlier else before.sum(0)).to(running.dtype)  # sums of ints are int64
            return (join if earlier else torch.add)(running, offset.unsqueeze(dim))

        def scan_in_place(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return overwrite(x, lambda old: scan(old, *args, **kwargs))

        if self.total is torch.logsumexp:
            return _with_zeros(scan)
        return scan_in_place if call.inplace else scan


def _with_zeros(scan: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``scan`` of logarithms, with the smallest number for that of 0: the gradient of a join of two ``-inf`` is NaN."""

    def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not x.is_floating_point():
            return scan(x, *args, **kwargs)
        least = torch.finfo(x.dtype).min
        out = scan(x.masked_fill(x == -torch.inf, least), *args, **kwargs)
        return out.masked_fill(out == least, -torch.inf)

    return local


class RunningExtreme(StrategyOp):
    """``cummax`` and ``cummin``: the running extreme and the index of its last occurrence.

    A sharded dim costs what a :class:`Scan` of two numbers does.

    Args:
        op: ``"max"`` or ``"min"``.
    """

    summary = OpSummary(
        "every dim",
        communicates="sharded scanned dim: 2 all-gathers of one slice per rank | 1 reduce-scatter",
        whole="a packed dim, whose pieces do not follow one another",
    )

    signature = "input, dim"

    def __init__(self, op_name: str, *, op: str) -> None:
        super().__init__(op_name)
        self.op = op

    def num_outputs(self, call: Call) -> int:
        return 2

    def strategies(self, call: Call) -> Iterable[Strategy]:
        return scan_rows(call)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        shape = tuple(call.inputs[0].shape)
        dim = normal_dim(call.arg("dim"), len(shape))
        over = OverAxes(targets[0], [dim] if shape else [])
        if not over:
            return None
        earlier = _earlier(over, shape, dim)
        run, op, pair = getattr(torch, call.name), self.op, getattr(torch.return_types, call.name)

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            values, places = run(x, dim)
            own = global_indices(over.layout, shape, dim, x.device)
            indices = own[places] if len(own) else places
            if len(own):
                last, last_index = values.narrow(dim, -1, 1), indices.narrow(dim, -1, 1)
            else:  # no element, which no other loses to
                last = (values.sum(dim, keepdim=True) + neutral(x.dtype, op)).to(x.dtype)
                last_index = torch.full_like(last, -1, dtype=torch.int64)
            totals, total_indices = over.gather(last, varying=True), over.gather(last_index)
            if not earlier:
                nothing = totals[torch.tensor(earlier, dtype=torch.int64, device=x.device)].sum(0).to(x.dtype)
                return pair((values + nothing, indices))
            best, best_index = totals[earlier[0]], total_indices[earlier[0]]
            for rank in earlier[1:]:
                takes = _takes_over(totals[rank], best, op) & (total_indices[rank] >= 0)
                best = torch.where(takes, totals[rank], best)
                best_index = torch.where(takes, total_indices[rank], best_index)
            takes = _takes_over(values, best, op)
            return pair((torch.where(takes, values, best), torch.where(takes, indices, best_index)))

        return local


def _takes_over(new: torch.Tensor, old: torch.Tensor, op: str) -> torch.Tensor:
    """Whether a later element becomes the running extreme: it does when equal, and NaN stays."""
    beats = new >= old if op == "max" else new <= old
    return (beats & ~old.isnan()) | new.isnan() if new.is_floating_point() else beats


def scan_rows(call: Call) -> Iterable[Strategy]:
    """Every dim sharded, the scanned one too where its pieces follow one another (not packed)."""
    dim = normal_dim(call.arg("dim"), len(call.inputs[0].shape))
    layout = call.inputs[0].layout
    for d in range(layout.ndim):
        packed = any(isinstance(layout.placements[a], PackedShard) for a in layout.shard_order[d])
        if d != dim or not packed:
            yield Strategy([S(d)], S(d))


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
