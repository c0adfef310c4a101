"""Operators that need some dims whole, on tensors where these are sharded: the rows are dealt out to the ranks.

A tensor that is sharded along ``dim`` becomes, by one all-to-all, as many whole lines along ``dim`` as each rank had
before; the operator runs on these, and another all-to-all brings the result back. No rank ever holds more than its
part. What folds the dims away leaves one small result per line, which is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Solution
from hyper_parallel._rules.families.exchange import plain
from hyper_parallel._rules.strategy import S, Strategy, StrategyOp
from hyper_parallel.comm.redistribute import transition
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Placement, Replicate, Shard, on_dim
from hyper_parallel.sharding.shard_ranges import local_shape
from hyper_parallel.sharding.spec import NOT_VARYING, inverse
from hyper_parallel.utils.structures import rebuilt

__all__ = ["Dealt", "WholeDims"]


class Dealt:
    """The lines of a tensor along ``dims``, dealt out over the mesh axes that shard these.

    Args:
        layout: of the tensor.
        shape: its global shape.
        dims: the dims that have to be whole, ascending.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...], dims: Sequence[int]) -> None:
        self.layout, self.shape, self.dims = layout, shape, tuple(dims)
        self.others = tuple(d for d in range(len(shape)) if d not in self.dims)
        self.axes = tuple(a for d in dims for a in layout.shard_order[d])
        here = local_shape(layout, shape, layout.info.my_coordinate())
        self.kept = tuple(here[d] for d in self.others)
        self._dealt = self._rows_over_axes(len(dims) + 1)

    def __bool__(self) -> bool:
        return any(self.layout.mesh_shape[a] > 1 for a in self.axes)

    def lines(self, x: torch.Tensor) -> torch.Tensor:
        """``[lines of this rank, *dims]`` from this rank's piece; one all-to-all."""
        rows = x.permute(*self.dims, *self.others).reshape(*(x.shape[d] for d in self.dims), math.prod(self.kept))
        sizes = (*(self.shape[d] for d in self.dims), math.prod(self.kept))
        order = (*(self.layout.shard_order[d] for d in self.dims), ())
        placements = {a: on_dim(self.layout.placements[a], i) for i, axes in enumerate(order) for a in axes}
        held = self._virtual(placements, order)
        return transition(rows, (held, NOT_VARYING), (self._dealt, NOT_VARYING), sizes).movedim(-1, 0)

    def back(self, lines: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the result from its ``[lines, *dims]``, whose dims may have other sizes; one all-to-all.
        The result's dims are sharded, plainly, by the axes that sharded them before."""
        sizes = (*lines.shape[1:], math.prod(self.kept))
        order = (*(self.layout.shard_order[d] for d in self.dims), ())
        wanted = self._virtual({a: Shard(i) for i, axes in enumerate(order) for a in axes}, order)
        rows = transition(lines.movedim(0, -1), (self._dealt, NOT_VARYING), (wanted, NOT_VARYING), sizes)
        rows = rows.reshape((*rows.shape[:-1], *self.kept))
        return rows.permute(inverse((*self.dims, *self.others)))

    def gathered(self, folded: torch.Tensor, keepdim: bool = False) -> torch.Tensor:
        """The whole result from this rank's ``[lines, *more]`` of a function that folds the dims away: ``[*other dims,
        *more]``; one all-gather."""
        layout = self._rows_over_axes(folded.ndim, 0)
        whole = layout.replicated()
        sizes = (math.prod(self.kept), *folded.shape[1:])
        out = transition(folded, (layout, NOT_VARYING), (whole, NOT_VARYING), sizes)
        out = out.reshape((*self.kept, *folded.shape[1:]))
        if keepdim:
            for d in self.dims:
                out = out.unsqueeze(d)
        return out

    def _rows_over_axes(self, ndim: int, dim: int = -1) -> Layout:
        dim %= ndim
        order = tuple(self.axes if d == dim else () for d in range(ndim))
        return self._virtual(dict.fromkeys(self.axes, Shard(dim)), order)

    def _virtual(self, placements: dict[int, Placement], order: tuple[tuple[int, ...], ...]) -> Layout:
        """A layout that says nothing of the axes along which the ranks have lines of their own."""
        count = len(self.layout.placements)
        return self.layout.with_order(tuple(placements.get(a, Replicate()) for a in range(count)), order)


class WholeDims(StrategyOp):
    """One tensor and an operator that needs some of its dims whole; every dim may be sharded.

    Args:
        signature: parameter names, of which the first is the tensor.
        outputs: number of outputs.
        folds: whether the whole dims disappear (unless ``keepdim``).

    Attributes:
        kernels_need_lines: whether the function itself may refuse a piece without any lines, as on a rank whose shard
            of another dim is empty; :meth:`on_lines` then runs on every sharded tensor.
    """

    kernels_need_lines: bool = False

    def __init__(self, op_name: str, *, signature: str, outputs: int = 1, folds: bool = False) -> None:
        self.signature = signature
        super().__init__(op_name)
        self.outputs, self.folds = outputs, folds

    def num_outputs(self, call: Call) -> int:
        return self.outputs

    def whole_dims(self, call: Call) -> tuple[int, ...]:
        """The dims that have to be whole, ascending."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define whole_dims")

    def on_lines(self, call: Call) -> Callable[..., Any]:
        """The operator on ``[lines, *whole dims]`` and the other arguments by name."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define on_lines")

    def folded_form(self, call: Call, out: torch.Tensor) -> torch.Tensor:
        """The result of a function that folds dims away, from ``[*other dims, *what on_lines gave more]``."""
        return out

    def keepdim(self, call: Call) -> bool:
        """Whether folded dims stay, with size 1."""
        return bool(call.arg("keepdim", False))

    def strategies(self, call: Call) -> Iterable[Strategy]:
        whole = self.whole_dims(call)
        gone = whole if self.folds and not self.keepdim(call) else ()
        ndim = len(call.inputs[0].shape)
        for d in range(ndim):
            if d not in whole:
                yield Strategy([S(d)], S(d - sum(g < d for g in gone)))
        for d in whole if ndim else ():
            yield Strategy([S(d)], Replicate() if self.folds else S(d))

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        if not self.folds:
            whole = self.whole_dims(call)
            solution.outputs = [plain(layout, whole) for layout in solution.outputs if layout is not None]
        return solution

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dims = self.whole_dims(call)
        if not targets[0].ndim:
            return None
        dealt = Dealt(targets[0], tuple(call.inputs[0].shape), dims)
        if not dealt and not (self.kernels_need_lines and any(targets[0].shard_order)):
            return None
        on_lines, folds, keep, arguments = self.on_lines(call), self.folds, self.keepdim(call), self.arguments
        first = arguments.names[0]

        def local(*args: Any, **kwargs: Any) -> Any:
            given = arguments.bind(args, kwargs)
            out = on_lines(dealt.lines(given.pop(first)), given)
            settle: Callable[[torch.Tensor], torch.Tensor] = (
                (lambda t: self.folded_form(call, dealt.gathered(t, keep))) if folds else dealt.back
            )
            return settle(out) if isinstance(out, torch.Tensor) else rebuilt(out, [settle(t) for t in out])

        return local
