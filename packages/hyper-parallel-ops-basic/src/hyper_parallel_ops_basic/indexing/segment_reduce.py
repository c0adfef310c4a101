"""``segment_reduce``: runs of rows of different lengths, folded.

Of rows that are sharded each rank folds its part of every segment, as all ranks know where the segments begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    OpSummary,
    OverAxes,
    P,
    R,
    S,
    dim_intervals,
    first_derivative_only,
    normal_dim,
    zeros_from,
)


class SegmentReduce(StrategyOp):
    """``segment_reduce(data, reduce, lengths=..., offsets=..., axis=0)``: ``lengths`` has the dims of the data up to
    ``axis``, and there the lengths of the segments (``offsets``: where they begin, and the end)."""

    summary = OpSummary(
        "every dim, those before the segmented one with the lengths; the segmented one leaves a pending sum (prod, max "
        "and min: a whole result)",
        pending="passes through sum and mean without an initial value",
        communicates=(
            "sharded segmented dim: max and min 1 all-reduce | 1 of the number of ties; prod 1 all-gather | slice"
        ),
        whole="the lengths of a row's segments: together they say where one begins",
    )

    signature = "data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None"

    @staticmethod
    def _axis(call: Call) -> int:
        return normal_dim(call.arg("axis", 0), len(call.spec("data").shape))

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        shape, axis = list(call.spec("data").shape), self._axis(call)
        named = "lengths" if call.index("lengths") is not None else "offsets"
        shape[axis] = call.spec(named).shape[axis] - (named == "offsets")
        return [tuple(shape)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        axis, is_linear = self._axis(call), call.arg("reduce") in ("sum", "mean")
        for d in range(len(call.spec("data").shape)):
            if d < axis:
                yield Strategy({"data": S(d), "lengths": S(d), "offsets": S(d)}, S(d))
            elif d > axis:
                yield Strategy({"data": S(d)}, S(d))
        yield Strategy({"data": S(axis)}, P if is_linear else R)
        if is_linear and call.arg("initial") is None:
            yield Strategy({"data": P}, P)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        axis, layout, shape = self._axis(call), targets[0], tuple(call.spec("data").shape)
        (result,), arguments, over = self.output_shapes(call), self.arguments, OverAxes(layout, [axis])

        def fold(data: torch.Tensor, reduce: str, **kwargs: Any) -> torch.Tensor:
            before, after = data.shape[:axis], data.shape[axis + 1 :]
            nothing = 0 in before or 0 in after  # which the kernel does not take
            if nothing:
                return zeros_from((*before, result[axis], *after), data)
            kwargs = {n: _in_order(v) if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
            return torch.segment_reduce(_in_order(data), reduce, **kwargs)

        if not over:

            def local(*args: Any, **kwargs: Any) -> torch.Tensor:
                bound = arguments.bind(args, kwargs) | {"axis": axis}
                return fold(bound.pop("data"), bound.pop("reduce"), **bound)

            return local
        here = layout.info.my_coordinate()
        held = dim_intervals(layout, shape, axis, here)
        is_first = not any(here[a] for a in over.axes)

        def local_part(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = arguments.bind(args, kwargs)
            data, reduce, initial = bound["data"], bound["reduce"], bound.get("initial")
            ends = _offsets(bound, shape[axis])
            mine = torch.zeros_like(ends)
            for start, stop in held:
                mine += (ends - start).clamp(0, stop - start)
            once = initial if is_first else None

            def part(data: torch.Tensor, reduce: str, initial: Any = None) -> torch.Tensor:
                return fold(data, reduce, axis=axis, offsets=mine, unsafe=True, initial=initial)

            if reduce == "prod":
                return over.gather(part(data, "prod", once)).prod(0)
            if reduce in ("max", "min"):
                return _SegmentExtreme.apply(data, over, part, reduce, initial, mine, axis)
            out = part(data, "sum", once)
            return out if reduce == "sum" else out / _counts(ends, initial, data.ndim - axis - 1)

        return local_part


def _counts(ends: torch.Tensor, initial: Any, dims_after: int) -> torch.Tensor:
    """By what the sums of segments are divided for their mean; an initial value makes empty segments count one."""
    lengths = ends.diff() if initial is None else ends.diff().clamp(1)
    return lengths.view(*lengths.shape, *(1,) * dims_after)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the strides of a contiguous tensor along dims of size 1 too, by which the kernel finds elements."""
    return x.reshape(-1).view(x.shape)


def _offsets(bound: dict[str, Any], size: int) -> torch.Tensor:
    """Where the segments begin, and the end of the last one.

    Raises:
        RuntimeError: when a segment has no length that it can have; on all ranks alike.
    """
    offsets = bound.get("offsets")
    if offsets is not None:
        if (offsets.diff() < 0).any():
            raise RuntimeError("segment_reduce(): Expected offsets that do not decrease")
        return offsets
    lengths = bound["lengths"]
    if not bound.get("unsafe"):
        if (lengths < 0).any():
            raise RuntimeError("lengths contains negative value!")
        if (lengths.sum(-1) != size).any():
            raise RuntimeError("segment_reduce(): Expected all rows of lengths along axis to sum to data.size(axis)")
    return torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))


class _SegmentExtreme(torch.autograd.Function):
    """Max or min of segments of which each rank has a part."""

    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        over: OverAxes,
        part: Callable[..., torch.Tensor],
        reduce: str,
        initial: Any,
        offsets: torch.Tensor,
        axis: int,
    ) -> torch.Tensor:
        best = over.extreme(part(data, reduce, initial), reduce)
        ctx.save_for_backward(data, best, _in_order(offsets))
        ctx.args = (over, part, reduce, axis)
        return best

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        data, best, offsets = ctx.saved_tensors
        over, part, reduce, axis = ctx.args

        def to_chosen(grad: torch.Tensor) -> torch.Tensor:
            if not data.numel():
                return torch.zeros_like(data)
            given = map(_in_order, (grad, best, data))
            return torch.ops.aten._segment_reduce_backward(*given, reduce, offsets=offsets, axis=axis)

        mine = part((to_chosen(torch.ones_like(best)) != 0).to(data.dtype), "sum")
        everywhere = over.sum(mine)
        # PyTorch divides a gradient among equal elements where it is positive; otherwise each of them gets all of it.
        share = torch.where((grad > 0) & (everywhere > 1), mine / everywhere, 1)
        return to_chosen(grad * share), None, None, None, None, None, None
