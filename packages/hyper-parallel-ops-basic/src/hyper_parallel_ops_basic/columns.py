"""``F.unfold`` and ``F.fold``: patches of an image as columns ``[batch, channels * patch, positions]``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel.boxes import Intervals, dim_intervals, length, local_shape
from hyper_parallel.call import Call, Solution
from hyper_parallel.families.empty_pieces import zeros_from
from hyper_parallel.families.moving import Move, indices_of, plain
from hyper_parallel.families.ranges import merged
from hyper_parallel.op import OpSummary
from hyper_parallel.plan import fit_rank
from hyper_parallel.strategy import P, S, Strategy, StrategyOp


class Columns(StrategyOp):
    """The rows of a column are those of one channel after another, so whole channels are computed where they lie. Rows
    then travel to (``fold``: come from) the equal chunks of all rows, where whole channels are none.

    Of sharded positions every rank joins its own columns, which leaves a pending sum.

    Args:
        joins: whether the columns are joined to an image (``fold``).
    """

    def __init__(self, op_name: str, *, signature: str, joins: bool = False) -> None:
        self.signature = signature
        super().__init__(op_name)
        self.joins = joins
        self.summary = OpSummary(
            "samples, channels; positions leave a pending sum" if joins else "samples, channels",
            pending="passes",
            communicates="channels that do not divide evenly: 1 all-to-all of the rows that change rank | the same",
            whole="" if joins else "positions: the patches overlap",
        )

    def strategies(self, call: Call) -> Iterable[Strategy]:
        batched = len(call.inputs[0].shape) == (3 if self.joins else 4)
        for d in range(1 + batched):
            yield Strategy([S(d)], S(d))
        if self.joins:
            yield Strategy([S(1 + batched)], P)
        yield Strategy([P], P)

    def solve(self, call: Call) -> Solution:
        solution = self._by_channels(call)
        layout, shape = solution.targets[0], tuple(call.inputs[0].shape)
        if not self.joins or not layout.shard_order[-1]:
            return solution
        func = solution.local or call.func
        held = indices_of(dim_intervals(layout, shape, len(shape) - 1, call.info.my_coordinate()))

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            room = x.new_zeros(*x.shape[:-1], shape[-1])
            return func(room.index_copy(-1, held.to(x.device), x), *args, **kwargs)

        solution.local = local
        return solution

    def _by_channels(self, call: Call) -> Solution:
        """The solution where positions are whole."""
        solution = super().solve(call)
        target, (output,) = solution.targets[0], solution.outputs
        assert output is not None
        shape, (result,) = tuple(call.inputs[0].shape), call.output_shapes()
        output, at = fit_rank(output, len(result)), len(shape) - (2 if self.joins else 3)
        if not target.shard_order[at]:
            return solution
        output = plain(output, [at])
        before, after = (target, shape), (output, result)
        channels, rows = (after, before) if self.joins else (before, after)
        patch = rows[1][at] // channels[1][at]

        def rows_of_channels(coordinate: tuple[int, ...]) -> Intervals:
            return tuple((a * patch, b * patch) for a, b in dim_intervals(*channels, at, coordinate))

        group = target.info.group(tuple(sorted(target.shard_order[at])))
        whole = [indices_of(rows_of_channels(c)) for c in group.coordinates]
        equal = [indices_of(dim_intervals(*rows, at, c)) for c in group.coordinates]
        move = Move(group, equal, whole) if self.joins else Move(group, whole, equal)
        func, joins, here = call.func, self.joins, call.info.my_coordinate()
        stays = all(merged(rows_of_channels(c)) == merged(dim_intervals(*rows, at, c)) for c in group.coordinates)
        own = list(local_shape(*(channels if joins else rows), here))
        own[at] = length(dim_intervals(*channels, at, here)) * (1 if joins else patch)

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            x = move(x, at) if joins and not stays else x
            out = func(x, *args, **kwargs) if x.numel() else zeros_from(own, x)
            return out if joins or stays else move(out, at)

        solution.outputs, solution.local = [output], local
        return solution
