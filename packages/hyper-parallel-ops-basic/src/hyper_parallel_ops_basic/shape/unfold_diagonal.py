"""Parts of a tensor that overlap or run across dims: ``unfold`` and ``diagonal``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    HeldIndices,
    OpSummary,
    S,
    Solution,
    normal_dim,
    one_row_more,
    pending_lookup,
    pending_rows,
    plain,
)
from hyper_parallel_ops_basic.spatial.halo import Window


class Unfold(StrategyOp):
    """``x.unfold(dimension, size, step)``: windows along a dim, whose elements become a new last dim.

    Along a sharded dim every rank gets its share of the windows: one all-to-all of what crosses the borders. The result
    is then a copy.
    """

    summary = OpSummary(
        "every dim",
        pending="passes, of any kind",
        communicates="sharded windowed dim: 1 all-to-all of the elements that change rank | the same",
    )

    signature = "input, dimension, size, step"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield from (Strategy([S(d)], S(d)) for d in range(len(call.inputs[0].shape)))
        yield from pending_rows(call)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        target, output = solution.targets[0], solution.outputs[0]
        assert output is not None
        shape = tuple(call.inputs[0].shape)
        dim = normal_dim(call.arg("dimension"), len(shape))
        solution.is_view = not shape or not target.shard_order[dim]
        if solution.is_view:
            return solution
        size, step = int(call.arg("size")), int(call.arg("step"))
        output = plain(output, [dim])
        move = Window(size, step).halo(target, output, shape[dim], dim)

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            part = move(x, dim)
            if part.shape[dim] >= size:
                return part.unfold(dim, size, step)
            return part.unsqueeze(-1).expand(*part.shape, size)  # no window; size 0 too when size is 0

        solution.outputs[0], solution.local, solution.copies = output, local, True
        return solution


class Diagonal(StrategyOp):
    """``diagonal(input, offset, dim1, dim2)``. Of a sharded matrix every rank has some elements: a pending sum.

    Args:
        last: whether the matrix lies in the last two dims by default (``torch.linalg.diagonal``).
    """

    summary = OpSummary(
        "every dim; those of the matrix leave a pending sum (bool: max)",
        pending="passes, of any kind",
    )

    signature = "input, offset=0, dim1=0, dim2=1"

    def __init__(self, op_name: str, *, last: bool = False) -> None:
        super().__init__(op_name)
        self.default = (-2, -1) if last else (0, 1)

    def _dims(self, call: Call) -> tuple[int, int]:
        ndim = len(call.inputs[0].shape)
        given = call.arg("dim1", self.default[0]), call.arg("dim2", self.default[1])
        return normal_dim(given[0], ndim), normal_dim(given[1], ndim)

    carries_writes = True

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        given = self.arguments.bind(args, kwargs)
        dims = tuple(given.get(name, default) for name, default in zip(("dim1", "dim2"), self.default, strict=True))
        offset = int(given.get("offset", 0))
        rows, columns = (list(range(s, s + value.shape[-1])) for s in (max(-offset, 0), max(offset, 0)))
        if rows:
            args[0].movedim(dims, (0, 1))[rows, columns] = value.movedim(-1, 0)

    def strategies(self, call: Call) -> Iterable[Strategy]:
        dims = self._dims(call)
        for d in range(len(call.inputs[0].shape)):
            gone = sum(m < d for m in dims)
            yield Strategy([S(d)], pending_lookup(call.inputs[0].dtype) if d in dims else S(d - gone))
        yield from pending_rows(call)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        rows, columns = self._dims(call)
        solution.copies = bool(solution.targets[0].shard_order[rows] or solution.targets[0].shard_order[columns])
        solution.is_view = not solution.copies
        return solution

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dims = self._dims(call)
        if not any(targets[0].shard_order[d] for d in dims):
            return None
        shape, offset = tuple(call.inputs[0].shape), int(call.arg("offset", 0))
        starts = max(-offset, 0), max(offset, 0)
        count = max(min(shape[d] - s for d, s in zip(dims, starts, strict=True)), 0)
        held = [HeldIndices(targets[0], shape, d) for d in dims]

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            along = torch.arange(count, device=x.device)
            places, here = zip(*(h.find(along + s) for h, s in zip(held, starts, strict=True)), strict=True)
            for d in dims:
                if x.shape[d] == 0:
                    x = one_row_more(x, d)
            found = x.movedim(dims, (-2, -1))[(..., places[0], places[1])]
            return found.masked_fill(~(here[0] & here[1]), 0)

        return local
