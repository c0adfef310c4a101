"""Largest and smallest elements, with or without their index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from hyper_parallel import Layout, Partial, Placement, Replicate, Shard, Strategy
from hyper_parallel.rules import (
    Call,
    OpSummary,
    OverAxes,
    Reduction,
    S,
    broadcast_shape,
    extremes,
    global_indices,
    shard_if_full,
)

_NOWHERE = torch.iinfo(torch.int64).max


class Extreme(Reduction):
    """``amax`` and ``amin``, ``max`` and ``min`` in their three forms.

    Over a sharded dim: a pending max or min; reduced inside where a gradient is needed (one all-reduce, and one of the
    number of ties backward) or the index is (two all-reduces: the value, then the first index that has it).

    Args:
        op: ``"max"`` or ``"min"``.
        indices: whether the form with a ``dim`` gives the index too (``max``), or takes several dims (``amax``).
    """

    summary = OpSummary(
        "every dim; a folded one leaves a pending max or min",
        pending="passes where its kind is the same",
        communicates="none; where a gradient or the index is needed 1 or 2 all-reduces | 1 of the number of ties",
    )

    signature = "input, dim=None, keepdim=False, *, other=None"

    def __init__(self, op_name: str, *, op: Literal["max", "min"], indices: bool = False) -> None:
        super().__init__(op_name)
        self.op, self.indices = op, indices

    def _other(self, call: Call) -> bool:
        return len(call.inputs) == 2

    def with_index(self, call: Call) -> bool:
        """Whether the call is ``max(x, dim)``, which returns values and indices."""
        return self.indices and self.given_dims(call) is not None

    def num_outputs(self, call: Call) -> int:
        return 1 if self._other(call) or not self.with_index(call) else 2

    def output_shapes(self, call: Call) -> Sequence[tuple[int, ...]] | None:
        if self._other(call):
            return [broadcast_shape([spec.shape for spec in call.inputs])]
        return None if self.with_index(call) else super().output_shapes(call)

    def strategies(self, call: Call) -> Iterable[Strategy]:
        if not self._other(call):
            yield from super().strategies(call)
            return
        shapes = [spec.shape for spec in call.inputs]
        out = broadcast_shape(shapes)
        for d in range(len(out)):
            yield Strategy([shard_if_full(shape, d, out) for shape in shapes], S(d))
        if not any(call.needs_grad):
            yield from extremes(self.op, len(shapes))

    def folded_output(self, call: Call) -> Placement:
        inside = call.needs_grad[0] or self.with_index(call)
        return Replicate() if inside else Partial(self.op)

    def pending(self, call: Call) -> Iterable[Strategy]:
        if not self._other(call) and not self.with_index(call) and not call.needs_grad[0]:
            yield Strategy([Partial(self.op)], Partial(self.op))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if self._other(call):
            return None
        over = self.over(call, targets)
        if not over:
            return None
        dims, keep, op = self.folded(call), self.keepdim(call), self.op
        if self.with_index(call):
            found = getattr(torch.return_types, op)
            shape = tuple(call.inputs[0].shape)
            return lambda x, *a, **k: found(_ExtremeAlong.apply(x, over, shape, dims[0], keep, op))
        if call.needs_grad[0]:
            return lambda x, *a, **k: _ExtremeOverAxes.apply(x, over, dims, keep, op, self.indices)
        return lambda x, *a, **k: local_extreme(x, dims, keep, op)


class ArgExtreme(Reduction):
    """``argmax`` and ``argmin``: the global index, the first one where several are equal. Two small all-reduces over a
    sharded dim.

    Args:
        op: ``"max"`` or ``"min"``.
    """

    summary = OpSummary(
        "every dim",
        communicates="sharded folded dim: 2 all-reduces",
    )

    def __init__(self, op_name: str, *, op: str) -> None:
        super().__init__(op_name)
        self.op = op

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        over = self.over(call, targets)
        if not over:
            return None
        shape, dims, keep, op = tuple(call.inputs[0].shape), self.folded(call), self.keepdim(call), self.op
        along = self.given_dims(call) is not None

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            x = x.detach()
            if along:
                return _first_extreme(x, over, shape, dims[0], keep, op)[1]
            value = local_extreme(x, dims, keep, op)
            best = over.extreme(value, op)
            index = value.new_full((), _NOWHERE, dtype=torch.int64)
            if x.numel():
                index = _flat_index(getattr(torch, f"arg{op}")(x), x.shape, over.layout, shape)
            found = torch.where(_same(value, best), index, _NOWHERE)
            return over.extreme(found, "min")

        return local


class MinMax(Reduction):
    """``aminmax``: both, pending, as one of the two is no max; reduced inside where a gradient is needed."""

    summary = OpSummary(
        "every dim; a folded one leaves a pending min and max",
        communicates="none; where a gradient is needed 2 all-reduces | 2 of the number of ties",
    )

    signature = "input, *, dim=None, keepdim=False"

    def num_outputs(self, call: Call) -> int:
        return 2

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for row in super().strategies(call):
            folded = isinstance(row.outputs, Placement) and not isinstance(row.outputs, Shard)
            inside = call.needs_grad[0]
            yield Strategy(row.inputs, [Partial("min"), Partial("max")]) if folded and not inside else row

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        over = self.over(call, targets)
        if not over:
            return None
        dims, keep, inside = self.folded(call), self.keepdim(call), call.needs_grad[0]

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if inside:
                low, high = (_ExtremeOverAxes.apply(x, over, dims, keep, op, False) for op in ("min", "max"))
            else:
                low, high = (local_extreme(x, dims, keep, op) for op in ("min", "max"))
            return torch.return_types.aminmax((low, high))

        return local


def neutral(dtype: torch.dtype, op: str) -> Any:
    """The value that changes no max (or min)."""
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -torch.inf if op == "max" else torch.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def local_extreme(x: torch.Tensor, dims: Sequence[int], keepdim: bool, op: str) -> torch.Tensor:
    """``amax`` or ``amin``; the neutral element where this rank holds nothing."""
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
        return x.new_full(shape, neutral(x.dtype, op))
    return getattr(x, f"a{op}")(dims, keepdim=keepdim)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Equal, where NaN equals NaN."""
    return (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b


def unfold(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """A folded tensor with its folded dims back, of size 1."""
    if not keepdim:
        for d in dims:
            x = x.unsqueeze(d)
    return x


def _first_extreme(
    x: torch.Tensor, over: OverAxes, shape: tuple[int, ...], dim: int, keepdim: bool, op: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The extreme along a sharded dim and its first global index."""
    value = local_extreme(x, (dim,), keepdim, op)
    best = over.extreme(value, op)
    index = torch.full_like(value, _NOWHERE, dtype=torch.int64)
    if x.shape[dim]:
        index = global_indices(over.layout, shape, dim, x.device)[getattr(x, op)(dim, keepdim=keepdim).indices]
    return best, over.extreme(torch.where(_same(value, best), index, _NOWHERE), "min")


def _flat_index(flat: torch.Tensor, local: Sequence[int], layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """Index into the flattened global tensor of an index into the flattened local one."""
    found, step = torch.zeros_like(flat), 1
    for d in reversed(range(len(shape))):
        at = flat % local[d]
        if layout.shard_order[d]:
            at = global_indices(layout, shape, d, flat.device)[at]
        found = found + at * step
        flat, step = flat // local[d], step * shape[d]
    return found


def tie_share(
    x: torch.Tensor, best: torch.Tensor, over: OverAxes, dims: tuple[int, ...], *, nans: bool = False
) -> torch.Tensor:
    """Each element's part of the gradient of the extreme ``best``: 1 over the number of ties, or 0. One all-reduce.

    Args:
        nans: whether the NaNs share the gradient of NaN. Otherwise all of it is NaN.
    """
    x, best = x.detach(), best.detach()
    mask = _same(x, best) if nans else x == best
    return mask / over.sum(mask.sum(dims, keepdim=True)).to(x.dtype)


class _ExtremeOverAxes(torch.autograd.Function):
    """``amax`` over sharded dims; equal elements share the gradient, as in PyTorch (of ``max()`` the NaNs too)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, over: OverAxes, dims: tuple[int, ...], keepdim: bool, op: str, nans: bool
    ) -> torch.Tensor:
        best = over.extreme(local_extreme(x, dims, keepdim, op), op)
        ctx.save_for_backward(x, best)
        ctx.args = (over, dims, keepdim, nans)
        return best

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, best = ctx.saved_tensors
        over, dims, keepdim, nans = ctx.args
        share = tie_share(x, unfold(best, dims, keepdim), over, dims, nans=nans)
        return over.vary(unfold(grad, dims, keepdim)) * share, None, None, None, None, None


class _ExtremeAlong(torch.autograd.Function):
    """``max(x, dim)`` over a sharded dim: the gradient goes to the element that was chosen."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, over: OverAxes, shape: tuple[int, ...], dim: int, keepdim: bool, op: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        best, index = _first_extreme(x, over, shape, dim, keepdim, op)
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        ctx.args = (over, shape, dim, keepdim)
        return best, index

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        over, shape, dim, keepdim = ctx.args
        mine = global_indices(over.layout, shape, dim, grad.device)
        view = [1] * len(shape)
        view[dim] = -1
        chosen = unfold(index, (dim,), keepdim) == mine.view(view)
        return over.vary(unfold(grad, (dim,), keepdim)) * chosen, None, None, None, None, None
