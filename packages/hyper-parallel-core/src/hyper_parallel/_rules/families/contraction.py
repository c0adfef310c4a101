"""Products that contract dimensions: matmul, linear, einsum and their relatives.

Every operand's dims are labelled. A label that reaches the output shards operands and output alike; a label that is
summed away leaves a pending sum; and the product is linear in each operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Ref, Solution
from hyper_parallel._rules.families.exchange import indices_of
from hyper_parallel._rules.families.held_indices import HeldIndices
from hyper_parallel._rules.op import OpSummary
from hyper_parallel._rules.strategy import P, R, S, Strategy, StrategyOp
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Placement
from hyper_parallel.sharding.shard_ranges import dim_intervals
from hyper_parallel.utils.structures import map_tensors


def contraction_strategies(
    shapes: Sequence[Sequence[int]],
    operands: Sequence[str],
    output: str,
    addend: tuple[Sequence[int], str] | None = None,
    dims: Sequence[Mapping[str, int]] | None = None,
) -> Iterable[Strategy]:
    """Strategies of ``operands -> output`` (labels per dim), with an optional tensor that is added to the product.

    The addend, when given, is the first input. A broadcast dim (size 1 where the label is larger) stays Replicate.

    Args:
        dims: per operand, the dim that is sharded for a label; by default the first that has it.
    """
    sizes: dict[str, int] = {}
    for shape, labels in zip(shapes, operands, strict=True):
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(sizes.get(label, 0), size) if size != 1 else sizes.get(label, 1)

    def on(shape: Sequence[int], places: Mapping[str, int], label: str) -> Any:
        d = places.get(label)
        return S(d) if d is not None and shape[d] == sizes[label] else R

    dims = dims or [{label: labels.index(label) for label in labels} for labels in operands]
    for label in dict.fromkeys("".join(operands)):
        inputs = [on(shape, places, label) for shape, places in zip(shapes, dims, strict=True)]
        if all(p == R for p in inputs):
            continue
        if label in output:
            added = [on(addend[0], {of: d for d, of in enumerate(addend[1])}, label)] if addend else []
            yield Strategy([*added, *inputs], S(output.index(label)))
        else:
            yield Strategy([*([P] if addend else []), *inputs], P)
    for i in range(len(operands)):
        yield Strategy([*([P] if addend else []), *(P if j == i else R for j in range(len(operands)))], P)


def contraction_shape(shapes: Sequence[Sequence[int]], operands: Sequence[str], output: str) -> tuple[int, ...] | None:
    """Output shape; None when the operands' sizes disagree (the function itself then says so best)."""
    sizes: dict[str, int] = {}
    for shape, labels in zip(shapes, operands, strict=True):
        for label, size in zip(labels, shape, strict=True):
            known = sizes.get(label, 1)
            if known != size and known != 1 and size != 1:
                return None
            sizes[label] = size if known == 1 else known
    return tuple(sizes[label] for label in output)


def _one(shape: tuple[int, ...] | None) -> list[tuple[int, ...]] | None:
    return None if shape is None else [shape]


def matmul_labels(a: int, b: int) -> tuple[str, str, str]:
    """Labels of ``matmul`` for operands of rank ``a`` and ``b`` (batch dims aligned from the right)."""
    batch = "ABCDEFGHIJKLMNOPQRSTUVW"
    if a == 1 and b == 1:
        return "k", "k", ""
    if a == 1:
        return "k", batch[: b - 2] + "kn", batch[: b - 2] + "n"
    if b == 1:
        return batch[: a - 2] + "mk", "k", batch[: a - 2] + "m"
    widest = max(a, b) - 2
    names = batch[:widest]
    return names[widest - (a - 2) :] + "mk", names[widest - (b - 2) :] + "kn", names + "mn"


# Where the operands that may be named stand.
_PLACES = {"input": 0, "mat": 1, "mat1": 1, "batch1": 1, "other": 2, "tensor": 2, "mat2": 2, "batch2": 2, "vec": 2}


def _places(call: Call) -> list[int]:
    """Positions among the inputs of the operands in the function's order, as named ones may come in any."""
    names = {value.index: name for name, value in call.kwargs.items() if isinstance(value, Ref)}
    return sorted(range(len(call.inputs)), key=lambda i: _PLACES.get(names.get(i, ""), i))


def _placed(strategies: Iterable[Strategy], places: Sequence[int]) -> Iterable[Strategy]:
    """Strategies for operands in the function's order as strategies for inputs at these positions."""
    for strategy in strategies:
        at: dict[int, Any] = dict(zip(places, strategy.inputs, strict=True))
        yield Strategy([at[i] for i in range(len(places))], strategy.outputs)


class MatMul(StrategyOp):
    """``matmul``, ``mm``, ``bmm``, ``mv``, ``dot`` and ``@``."""

    summary = OpSummary(
        "batch dims, rows, columns; a sharded summed dim leaves a pending sum",
        pending="passes through one factor",
    )

    scalars_matter = False

    def strategies(self, call: Call) -> Iterable[Strategy]:
        places = _places(call)
        a, b = (call.inputs[place].shape for place in places)
        left, right, out = matmul_labels(len(a), len(b))
        return _placed(contraction_strategies([a, b], [left, right], out), places)

    def output_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        a, b = (call.inputs[place].shape for place in _places(call))
        left, right, out = matmul_labels(len(a), len(b))
        return _one(contraction_shape([a, b], [left, right], out))


class AddMatMul(StrategyOp):
    """``addmm``, ``baddbmm``, ``addmv``, ``addbmm``: a tensor plus a product.

    Args:
        batch_sum: whether the batch dimension is summed away (``addbmm``).
    """

    summary = OpSummary(
        "batch dims, rows, columns; a sharded summed dim leaves a pending sum",
        pending="passes through the addend together with one factor",
    )

    signature = "input, a, b, *, beta=1, alpha=1"
    scalars_matter = False

    def __init__(self, op_name: str, *, batch_sum: bool = False) -> None:
        super().__init__(op_name)
        self.batch_sum = batch_sum

    def strategies(self, call: Call) -> Iterable[Strategy]:
        places = _places(call)
        added, a, b = (call.inputs[place].shape for place in places)
        left, right, out = matmul_labels(len(a), len(b))
        if self.batch_sum:
            out = out[1:]
        strategies = contraction_strategies([a, b], [left, right], out, (added, out[len(out) - len(added) :]))
        return _placed(strategies, places)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        added, matrix, _ = (call.inputs[place] for place in _places(call))
        func = call.func
        if self.op_name == "addmv" and added.shape != matrix.shape[:1]:
            func = _adding_one_to_each_row(func)
        if not (added.dtype.is_floating_point or added.dtype.is_complex):
            func = _with_whole_factors(func)
        return None if func is call.func else func


def _adding_one_to_each_row(func: Callable[..., Any]) -> Callable[..., Any]:
    """For no rows at all addmv gives back the one element."""

    def local(input: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, **factors: Any) -> torch.Tensor:
        return func(input.expand(len(mat)), mat, vec, **factors)

    return local


def _with_whole_factors(func: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch cuts off factors of whole numbers, unless there is nothing to sum, as on a rank with an empty piece: then
    it raises."""

    def local(*tensors: torch.Tensor, **others: Any) -> torch.Tensor:
        return func(*tensors, **{name: int(v) if isinstance(v, float) else v for name, v in others.items()})

    return local


class Linear(StrategyOp):
    """``F.linear(input, weight, bias)``."""

    summary = OpSummary(
        "batch dims, output features; sharded input features leave a pending sum",
        pending="passes through one factor",
    )

    signature = "input, weight, bias=None"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        x, w = call.spec("input").shape, call.spec("weight").shape
        features = "n" if len(w) == 2 else ""
        batch = "ABCDEFGHIJKLMNOPQRSTUVW"[: len(x) - 1]
        output = batch + features
        x_at, w_at = call.position("input"), call.position("weight")
        bias = call.index("bias")
        for row in contraction_strategies([x, w], [batch + "k", features + "k"], output):
            inputs: list[Placement] = [R] * len(call.inputs)
            assert isinstance(row.inputs, list)
            inputs[x_at], inputs[w_at] = row.inputs
            if bias is not None:
                # Added once: sharded with the output features, or pending when the product is.
                inputs[bias] = P if row.outputs == P else S(0) if features and row.outputs == S(len(batch)) else R
            yield Strategy(inputs, row.outputs)

    def output_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        x, w = call.spec("input").shape, call.spec("weight").shape
        return [(*x[:-1], *w[:-1])] if x[-1] == w[-1] else None


class Einsum(StrategyOp):
    """``torch.einsum`` with an equation; ``...`` stands for leading batch dims.

    Of a label that occurs twice in one operand, a diagonal, one dim counts: of the other each rank takes the part that
    meets its own. Where another mesh axis shards that other dim, what a rank does not hold counts as 0: a pending sum.
    """

    summary = OpSummary(
        "every label, diagonals too (a label twice in one operand); a summed one leaves a pending sum, and so does a "
        "diagonal of which both dims are sharded",
        pending="passes through one factor",
    )

    @staticmethod
    def _operands(call: Call) -> tuple[list[str], str, list[dict[str, int]]]:
        """Labels of operands and output, and per operand the dim that is sharded for a label."""
        operands, output = einsum_labels(call.args[0], [len(s.shape) for s in call.inputs])
        dims: list[dict[str, int]] = []
        for labels, spec in zip(operands, call.inputs, strict=True):
            order = spec.layout.shard_order
            # The first that is sharded, or else the first, is put in last.
            dims.append({labels[d]: d for d in sorted(range(len(labels)), key=lambda d: (bool(order[d]), -d))})
        return operands, output, dims

    def strategies(self, call: Call) -> Iterable[Strategy]:
        operands, output, dims = self._operands(call)
        yield from contraction_strategies([s.shape for s in call.inputs], operands, output, dims=dims)
        for i, labels in enumerate(operands):
            for d, label in enumerate(labels):
                if d != dims[i][label] and call.inputs[i].layout.shard_order[d]:
                    yield Strategy([S(d) if j == i else R for j in range(len(operands))], P)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        if len(call.inputs) == 1 and call.meta_result()._base is call.inputs[0].meta:
            # Dims that only change places, or a diagonal: a view, unless the diagonal's parts had to be put together.
            solution.is_view, solution.copies = True, solution.local is not None
        return solution

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        operands, _, dims = self._operands(call)
        cuts: list[list[tuple[HeldIndices, torch.Tensor]]] = [[] for _ in operands]
        for spec, labels, places, target, own in zip(call.inputs, operands, dims, targets, cuts, strict=True):
            shape, here = tuple(spec.shape), target.info.my_coordinate()
            for d, label in enumerate(labels):
                along = places[label]
                if d != along and (target.shard_order[d] or target.shard_order[along]):
                    mine = indices_of(dim_intervals(target, shape, along, here))
                    own.append((HeldIndices(target, shape, d), mine))
        if not any(cuts):
            return None
        func = call.func

        def local(equation: str, *tensors: Any) -> torch.Tensor:
            cuts_of_next = iter(cuts)

            def cut(x: torch.Tensor) -> torch.Tensor:
                for held, mine in next(cuts_of_next):
                    x = held.select(x, mine.to(x.device))
                return x

            return func(equation, *map_tensors(tensors, cut))

        return local


def einsum_labels(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Labels of every operand and of the output, with ``...`` spelled out."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    used = {c for c in equation if c.isalpha()}
    free = [c for c in map(chr, range(0x3B1, 0x3B1 + 24)) if c not in used]
    widest = max((r - len(p.replace("...", "")) for p, r in zip(parts, ranks, strict=True) if "..." in p), default=0)
    dots = "".join(free[:widest])

    def spell(part: str, rank: int) -> str:
        return part.replace("...", dots[widest - (rank - len(part.replace("...", ""))) :] if "..." in part else "")

    operands = [spell(p, r) for p, r in zip(parts, ranks, strict=True)]
    if arrow:
        return operands, right.replace("...", dots)
    letters = "".join(p.replace("...", "") for p in parts)
    return operands, dots + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
