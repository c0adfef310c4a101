"""``tril`` and ``triu``: the diagonal is that of the global matrix, wherever a rank's piece lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, S, global_indices, pending_rows


class Triangle(StrategyOp):
    """``tril`` and ``triu``: the diagonal is that of the global matrix."""

    summary = OpSummary(
        "every dim",
        pending="passes, of any kind",
    )

    signature = "input, diagonal=0"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.inputs[0].shape)):
            yield Strategy([S(d)], S(d))
        yield from pending_rows(call)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        layout, shape = targets[0], tuple(call.inputs[0].shape)
        ndim = len(shape)
        if not layout.shard_order[ndim - 2] and not layout.shard_order[ndim - 1]:
            return None
        rows, columns = (global_indices(layout, shape, d, torch.device("cpu")) for d in (ndim - 2, ndim - 1))
        diagonal = int(call.arg("diagonal", 0))
        lower = call.name.startswith("tril")
        offset = _offset(rows, columns)
        if offset is not None:
            func = call.func
            return lambda x, *args, **kwargs: func(x, diagonal + offset)
        above = columns[None, :] - rows[:, None]
        cut = above > diagonal if lower else above < diagonal
        fill = torch.Tensor.masked_fill_ if call.inplace else torch.Tensor.masked_fill
        return lambda x, *args, **kwargs: fill(x, cut.to(x.device), 0)


def _offset(rows: torch.Tensor, columns: torch.Tensor) -> int | None:
    """Rows minus columns of the first element, when both are contiguous; an empty piece has no diagonal."""
    if not len(rows) or not len(columns):
        return 0
    for positions in (rows, columns):
        if int(positions[-1] - positions[0]) != len(positions) - 1:
            return None
    return int(rows[0] - columns[0])
