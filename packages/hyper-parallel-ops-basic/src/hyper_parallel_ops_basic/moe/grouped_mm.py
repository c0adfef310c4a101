"""Products of groups of rows with a matrix each, as a mixture of experts has them: ``torch._grouped_mm`` and alike."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    Intervals,
    OpSummary,
    contraction_shape,
    contraction_strategies,
    dim_intervals,
    zeros_from,
)

__all__ = ["GroupedMM", "plain_grouped_mm"]

# Labels of operands and result: e groups; s the rows of all groups, one after the other; m, k, n of each product.
LABELS = {
    (2, 3): ("sk", "ekn", "sn"),
    (3, 2): ("emk", "ks", "ms"),
    (2, 2): ("ms", "sn", "emn"),
    (3, 3): ("emk", "ekn", "emn"),
}


class GroupedMM(StrategyOp):
    """``torch._grouped_mm(a, b, offs)``, ``F.grouped_mm``, and transformers' ``grouped_mm_fallback``.

    ``offs[i]`` is where group ``i`` ends among the rows. Nothing is communicated:

    - Features are sharded as in any product; contracted ones leave a pending sum.
    - Groups (experts): each rank computes the rows of its own ones, a pending sum. Two offsets are read from the device
      to know where they lie.
    - Rows (tokens): each rank computes those that it holds, with offsets of its own.

    Rows beyond the last offset have no meaning, as in PyTorch.

    Args:
        operands: names of the two operands.
    """

    summary = OpSummary(
        "rows (tokens), features, groups (experts); sharded groups and contracted features leave a pending sum",
        pending="passes through one factor",
    )

    def __init__(self, op_name: str, *, operands: Sequence[str] = ("mat_a", "mat_b")) -> None:
        self.operands = tuple(operands)
        self.signature = f"{', '.join(operands)}, offs=None, bias=None, out_dtype=None"
        super().__init__(op_name)

    def labels(self, call: Call) -> tuple[str, str, str]:
        """Labels of both operands and of the result.

        Raises:
            RuntimeError: an operand is no matrix and no stack of them.
        """
        ranks = tuple(len(call.spec(name).shape) for name in self.operands)
        if ranks not in LABELS:
            raise RuntimeError(f"{call.name}: operands have 2 or 3 dimensions each, got {ranks[0]} and {ranks[1]}")
        return LABELS[ranks]

    def output_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        *operands, out = self.labels(call)
        shapes = [tuple(call.spec(name).shape) for name in self.operands]
        if out == "emn" and len(shapes[0]) == 2:
            operands, shapes = [*operands, "e"], [*shapes, tuple(call.spec("offs").shape)]
        shape = contraction_shape(shapes, operands, out)
        return None if shape is None else [shape]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        *operands, out = self.labels(call)
        shapes = [tuple(call.spec(name).shape) for name in self.operands]
        for row in contraction_strategies(shapes, operands, out):
            assert isinstance(row.inputs, list)
            yield Strategy(dict(zip(self.operands, row.inputs, strict=True)), row.outputs)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if all(layout.is_replicated() for layout in targets):
            return None
        labels = self.labels(call)
        operands = [call.position(name) for name in self.operands]
        rows = held_of_label(call, targets, operands, labels, "s")
        own_groups = held_of_label(call, targets, operands, labels, "e") if "e" not in labels[2] else None
        arguments, func, names = self.arguments, call.func, self.operands

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            if given.get("bias") is not None or given.get("out_dtype") not in (None, given[names[0]].dtype):
                return func(*args, **kwargs)  # says that PyTorch does not support it
            a, b, offs = given[names[0]], given[names[1]], given.get("offs")
            if rows is not None:
                offs = ends_among(offs, rows)
            product = functools.partial(_product, func)
            return product(a, b, offs) if own_groups is None else with_own_groups(product, a, b, offs, own_groups)

        return local


def held_of_label(
    call: Call, targets: Sequence[Layout], operands: Sequence[int], labels: Sequence[str], label: str
) -> Intervals | None:
    """What this rank holds of the dim of this label; None when no operand shards it.

    Args:
        operands: which of the call's inputs the first labels mean.
    """
    for index, own in zip(operands, labels, strict=False):
        dim = own.find(label)
        if dim >= 0 and targets[index].shard_order[dim]:
            shape = tuple(call.inputs[index].shape)
            return dim_intervals(targets[index], shape, dim, targets[index].info.my_coordinate())
    return None


def ends_among(offs: Any, rows: Intervals) -> torch.Tensor:
    """Where each group ends among the rows of these intervals, taken one after the other."""
    ends = torch.zeros_like(offs)
    for start, stop in rows:
        ends = ends + (offs - start).clamp(0, stop - start)
    return ends


def with_own_groups(
    product: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, offs: Any, groups: Intervals
) -> torch.Tensor:
    """``product(a, b, offs)`` for the groups that this rank holds; zeros in the rows of the others."""
    rows_first = a.ndim == 2
    along, matrices = (0, b) if rows_first else (1, a)
    parts, done, used = [], 0, 0
    size = (a if rows_first else b).shape[along]
    template = (size, b.shape[2]) if rows_first else (a.shape[1], size)
    for start, stop in groups:
        first, last = int(offs[start - 1]) if start else 0, int(offs[stop - 1])
        own = matrices[used : used + stop - start]
        rows = (a if rows_first else b).narrow(along, first, last - first)
        part = product(*((rows, own) if rows_first else (own, rows)), offs[start:stop] - first)
        parts += [_zeros(part, along, first - done), part]
        done, used = last, used + stop - start
    if not parts:
        return zeros_from(template, a, b)
    return torch.cat([*parts, _zeros(parts[-1], along, size - done)], along)


def _zeros(like: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return like.new_zeros([count if d == dim else n for d, n in enumerate(like.shape)])


def _product(func: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """The kernel where it takes these pieces and their gradients, else the definition."""
    if _fits_kernel(a) and _fits_kernel(b):
        return func(a, b) if offs is None else func(a, b, offs=offs)
    return plain_grouped_mm(a, b, offs)


def _fits_kernel(x: torch.Tensor) -> bool:
    """Kernels want every row to begin at a multiple of 16 bytes; in the backward that goes for columns too."""
    one, step = sorted(x.stride()[-2:])
    lengths = [step, *(x.shape[-2:] if x.ndim == 3 else ())]
    return bool(x.numel()) and one == 1 and all(n * x.element_size() % 16 == 0 for n in lengths)


def plain_grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """The grouped product as its definition has it, for any dtype, size and stride; zeros beyond the last offset.

    Args:
        a, b: ``[rows, k]`` and ``[groups, k, n]``; ``[groups, m, k]`` and ``[k, rows]``; ``[m, rows]`` and ``[rows,
            n]``; or ``[groups, m, k]`` and ``[groups, k, n]``.
        offs: where each group ends among the rows; None for the last form.
    """
    if offs is None:
        return a @ b
    bounds = list(itertools.pairwise([0, *offs.tolist()]))
    if a.ndim == b.ndim == 2:
        if not bounds:
            return zeros_from((0, a.shape[0], b.shape[1]), a, b)
        return torch.stack([a[:, start:stop] @ b[start:stop] for start, stop in bounds])
    rows_first = a.ndim == 2
    along, size = (0, a.shape[0]) if rows_first else (1, b.shape[1])
    if not bounds:
        return zeros_from((size, b.shape[2]) if rows_first else (a.shape[1], size), a, b)
    if rows_first:
        parts = [a[start:stop] @ b[i] for i, (start, stop) in enumerate(bounds)]
    else:
        parts = [a[i] @ b[:, start:stop] for i, (start, stop) in enumerate(bounds)]
    return torch.cat([*parts, _zeros(parts[0], along, size - bounds[-1][1])], along)
