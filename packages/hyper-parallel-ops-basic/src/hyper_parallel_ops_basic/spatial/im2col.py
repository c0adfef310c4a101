"""``F.unfold`` and ``F.fold``: patches of an image as columns ``[batch, channels * patch, positions]``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    Intervals,
    OpSummary,
    P,
    S,
    Solution,
    dim_intervals,
    fit_rank,
    indices_of,
    length,
    local_shape,
    merged,
    plain,
    zeros_from,
)
from hyper_parallel_ops_basic.spatial.convolution import each
from hyper_parallel_ops_basic.spatial.halo import Window
from hyper_parallel_ops_basic.spatial.im2col_positions import Patches, in_every_row

Placed = tuple[Layout, tuple[int, ...]]
"""A tensor's layout and global shape."""


class Columns(StrategyOp):
    """The rows of a column are those of one channel after another, so whole channels are computed where they lie. Rows
    then travel to (``fold``: come from) equal chunks of all rows, unless whole channels are such chunks.

    Of sharded positions every rank fetches those that its columns show (``unfold``), or joins its own columns, which
    leaves a pending sum (``fold``).

    Args:
        joins: whether the columns are joined to an image (``fold``).
    """

    def __init__(self, op_name: str, *, signature: str, joins: bool = False) -> None:
        self.signature = signature
        super().__init__(op_name)
        self.joins = joins
        positions = "" if joins else "sharded positions: 1 all-to-all of those that columns of other ranks show; "
        self.summary = OpSummary(
            "samples, channels; positions leave a pending sum"
            if joins
            else "every dim; of a sharded width each rank gets a chunk of every row of columns (`PackedShard`)",
            pending="passes",
            communicates=f"{positions}channels that do not divide evenly: 1 all-to-all of the rows that change rank "
            "| the same",
        )

    def strategies(self, call: Call) -> Iterable[Strategy]:
        columns = len(call.inputs[0].shape) - (1 if self.joins else 2)
        for d in range(columns):
            yield Strategy([S(d)], S(d))
        if self.joins:
            yield Strategy([S(columns)], P)
        else:
            yield Strategy([S(columns)], S(columns))
            counts = [w.count(n) for w, n in zip(_windows(call), call.inputs[0].shape[-2:], strict=True)]
            yield Strategy([S(columns + 1)], in_every_row(columns, counts))
        yield Strategy([P], P)

    def solve(self, call: Call) -> Solution:
        (result,) = call.output_shapes()  # first, as what PyTorch refuses has no layouts
        solution = super().solve(call)
        # On meta tensors PyTorch may give columns another order in memory.
        solution.meta = lambda x, *args, **kwargs: x.new_empty(result)
        target, (output,) = solution.targets[0], solution.outputs
        assert output is not None
        shape, joins, here = tuple(call.inputs[0].shape), self.joins, call.info.my_coordinate()
        at = len(shape) - (2 if joins else 3)
        if not any(target.shard_order[at:]):
            return solution
        output, fetch, func = self._of_positions(call, target, plain(fit_rank(output, len(result)), [at]))
        before, after = (target, shape), (output, result)
        image, columns = (after, before) if joins else (before, after)
        move = _rows_that_travel(image, columns, at, joins)
        own = list(local_shape(*after, here))
        own[at] = length(dim_intervals(*image, at, here)) * (result[at] // image[1][at])

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            x = fetch(move(x, at) if move and joins else x)
            out = func(x, *args, **kwargs) if x.numel() else zeros_from(own, x)
            return move(out, at) if move and not joins else out

        solution.outputs, solution.local = [output], local
        return solution

    def _of_positions(
        self, call: Call, target: Layout, output: Layout
    ) -> tuple[Layout, Callable[[torch.Tensor], torch.Tensor], Callable[..., torch.Tensor]]:
        """The result's layout; the function that brings what this rank needs of the input; and that which makes its
        positions of that."""
        shape, (result,) = tuple(call.inputs[0].shape), call.output_shapes()
        if not self.joins and any(target.shard_order[-2:]):
            patches = Patches(_windows(call), (target, shape), (output, result))
            return patches.output, patches.fetch, patches.columns
        if not self.joins or not target.shard_order[-1]:
            return output, lambda x: x, call.func
        held = indices_of(dim_intervals(target, shape, len(shape) - 1, call.info.my_coordinate()))

        def among_all(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(*x.shape[:-1], shape[-1]).index_copy(-1, held.to(x.device), x)

        return output, among_all, call.func


def _windows(call: Call) -> list[Window]:
    """What a column shows, for each position dim of the image."""
    defaults = {"kernel_size": None, "stride": 1, "dilation": 1, "padding": 0}
    given = (each(call.arg(name, default), 2) for name, default in defaults.items())
    return [Window(k, s, d, (p, p)) for k, s, d, p in zip(*given, strict=True)]


def _rows_that_travel(image: Placed, columns: Placed, at: int, joins: bool) -> ExchangePlan | None:
    """From the rows of whole channels to the chunks of all rows (``joins``: back); None where these are the same."""
    (layout, channels), (_, rows) = image, columns
    if not layout.shard_order[at]:
        return None
    patch = rows[at] // channels[at]

    def rows_of_channels(coordinate: tuple[int, ...]) -> Intervals:
        return tuple((a * patch, b * patch) for a, b in dim_intervals(*image, at, coordinate))

    group = layout.info.group(tuple(sorted(layout.shard_order[at])))
    pairs = [(rows_of_channels(c), dim_intervals(*columns, at, c)) for c in group.coordinates]
    if all(merged(mine) == merged(chunk) for mine, chunk in pairs):
        return None
    whole, equal = ([indices_of(intervals) for intervals in some] for some in zip(*pairs, strict=True))
    return ExchangePlan(group, equal, whole) if joins else ExchangePlan(group, whole, equal)
