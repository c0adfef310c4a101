"""Sets and sorted sequences: ``unique``, ``isin``, ``searchsorted``, ``bucketize``.

Tables of distinct values are small next to what they are made of: each rank finds its own, and these are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Placement, Strategy, StrategyOp
from hyper_parallel.rules import Call, LayoutOp, OpSummary, OverAxes, P, R, S, Solution, broadcast_shape, shard_if_full
from hyper_parallel_ops_basic.indexing.mask_positions import by_data, known, of_dims
from hyper_parallel_ops_basic.values.factories import settled


class Unique(LayoutOp):
    """``unique(input, sorted, return_inverse, return_counts, dim)``.

    The values come out sorted and whole on every rank, the inverse laid out like the input. Costs an all-gather of the
    ranks' numbers of values, one of the values, and for the counts one all-reduce. Slices along ``dim`` are values of
    which every rank sees only a part, unless that dim alone is sharded.
    """

    summary = OpSummary(
        "every dim; the values come out whole, the inverse like the input",
        communicates="2 all-gathers, of counts and of the ranks' distinct values; for counts 1 all-reduce",
        whole="with `dim`, the other dims: rows are compared as a whole",
    )

    signature = "input, sorted=True, return_inverse=False, return_counts=False, dim=None"

    def solve(self, call: Call) -> Solution:
        layout, shape = settled(call.inputs[0].layout), tuple(call.inputs[0].shape)
        dim = call.dim("dim")
        if dim is not None:  # rows as values: the other dims have to be whole
            beyond = [a for d in range(len(shape)) if d != dim for a in layout.shard_order[d]]
            layout = layout.with_placements(dict.fromkeys(beyond, R))
        inverse, counts = bool(call.arg("return_inverse")), bool(call.arg("return_counts"))
        over = OverAxes(layout, range(len(shape)))
        whole = layout.replicated(1)

        def find(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            mine, places, found = torch.unique(x.detach(), True, True, True, dim)
            values, first = _gathered(mine, over, dim or 0)
            table, positions = torch.unique(values, True, True, False, dim)
            # Where this rank's own values lie in the table of all: they were gathered in the ranks' order.
            own = positions.narrow(0, first, len(found))
            spec = whole if dim is None else layout.replicated(len(shape))
            results = [known(table, spec, table.shape)]
            if inverse:
                where = layout if dim is None else of_dims(layout, [dim])
                results.append(known(own[places], where, shape if dim is None else (shape[dim],)))
            if counts:
                total = torch.zeros(table.shape[dim or 0], dtype=torch.int64, device=x.device)
                results.append(known(over.sum(total.index_add_(0, own, found)), whole, total.shape))
            return results[0] if len(results) == 1 else tuple(results)

        return Solution([layout], [], find, meta=by_data)


def _gathered(mine: torch.Tensor, over: OverAxes, dim: int) -> tuple[torch.Tensor, int]:
    """The ranks' tensors, of different lengths along ``dim``, one after the other; and where this rank's begins."""
    if not over:
        return mine, 0
    counts = [int(n) for n in over.gather(torch.tensor([mine.shape[dim]], device=mine.device))]
    rows = mine.movedim(dim, 0)
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    whole = torch.cat([part[:n] for part, n in zip(over.gather(padded), counts, strict=True)])
    group = over.layout.info.group(over.axes)
    return whole.movedim(0, dim), sum(counts[: sorted(group.coordinates).index(group.coordinates[group.rank])])


class IsIn(StrategyOp):
    """``isin(elements, test_elements)``: sharded elements stay so; of sharded test elements each rank knows some."""

    summary = OpSummary(
        "every dim; test elements leave a pending max",
    )

    signature = "elements, test_elements, *, assume_unique=False, invert=False"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        if call.index("elements") is not None:
            for d in range(len(call.spec("elements").shape)):
                yield Strategy({"elements": S(d)}, S(d))
        if call.index("test_elements") is not None:
            known = Partial("min" if call.arg("invert") else "max")
            for d in range(len(call.spec("test_elements").shape)):
                yield Strategy({"test_elements": S(d)}, known)


class SearchSorted(StrategyOp):
    """``searchsorted`` and ``bucketize``: how many elements of a sorted sequence lie before each value.

    Sharded values stay so. A sharded sequence: each rank counts in its piece, a pending sum.

    Args:
        sequence: name of the argument that is the sorted sequence; ``signature`` has it and ``values``.
    """

    summary = OpSummary(
        "every dim of the values; a sharded sequence leaves a pending sum",
    )

    def __init__(self, op_name: str, *, signature: str, sequence: str, values: str) -> None:
        self.signature = signature
        super().__init__(op_name)
        self.sequence, self.values = sequence, values

    def strategies(self, call: Call) -> Iterable[Strategy]:
        at = call.index(self.values)
        values = call.inputs[at].shape if at is not None else torch.Size()
        sequence = call.spec(self.sequence).shape
        for d in range(len(values)):
            row: dict[str, Placement] = {self.values: S(d)}
            if len(sequence) > 1 and d < len(values) - 1:
                row[self.sequence] = S(d)
            yield Strategy(row, S(d))
        if call.index("sorter") is None:
            yield Strategy({self.sequence: S(len(sequence) - 1)}, P)


class CDist(StrategyOp):
    """``cdist(x1, x2, p)``: ``[..., P, M]`` and ``[..., R, M]`` to ``[..., P, R]``.

    Batch dims and rows of either may be sharded. Sharded features: the norm of the ranks' distances, one all-gather.
    """

    summary = OpSummary(
        "batch dims, rows of either, features",
        communicates="sharded features: 1 all-gather of the distances | slice",
    )

    signature = "x1, x2, p=2.0, compute_mode=None"
    floats_matter = True

    def strategies(self, call: Call) -> Iterable[Strategy]:
        shapes = [tuple(call.spec(n).shape) for n in ("x1", "x2")]
        batch = broadcast_shape([s[:-2] for s in shapes])
        for d in range(len(batch)):
            yield Strategy([shard_if_full(s[:-2], d, batch) for s in shapes], S(d))
        yield Strategy({"x1": S(len(shapes[0]) - 2)}, S(len(batch)))
        yield Strategy({"x2": S(len(shapes[1]) - 2)}, S(len(batch) + 1))
        yield Strategy({"x1": S(len(shapes[0]) - 1), "x2": S(len(shapes[1]) - 1)}, R)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        over = OverAxes(targets[0], [targets[0].ndim - 1])
        if not over:
            return None
        p, arguments = float(call.arg("p", 2.0)), self.arguments

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            mine = torch.cdist(given["x1"], given["x2"], p)
            return _joined(over.gather(mine), p)

        return local


class PDist(StrategyOp):
    """``pdist(input, p)``: ``[N, M]`` to the distances of all pairs of rows; features as in :class:`CDist`."""

    summary = OpSummary(
        "features",
        communicates="sharded features: 1 all-gather of the distances | slice",
        whole="the rows: each of them meets every other",
    )

    signature = "input, p=2.0"
    floats_matter = True

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield Strategy([S(1)], R)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        over = OverAxes(targets[0], [1])
        if not over:
            return None
        func, p = call.func, float(call.arg("p", 2.0))
        return lambda x, *args, **kwargs: _joined(over.gather(func(x, p)), p)


def _joined(distances: torch.Tensor, p: float) -> torch.Tensor:
    """The distances by all features from those by each rank's, which lie along the first dim."""
    # With p = 0 a distance is the number of features that differ.
    return distances.sum(0) if p == 0 else torch.linalg.vector_norm(distances, p, 0)
