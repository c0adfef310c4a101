"""``F.linear_cross_entropy``: a head and its cross entropy, in chunks of rows, so that there are never all scores.

Forward, each chunk's scores give their maximum, sum of exponentials and target's score, and are dropped; what the ranks
that share the classes exchange are those three numbers per row, once for all chunks. Backward, each chunk's scores are
computed again: one more product with the weight is the price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from hyper_parallel import Layout, Partial, Replicate, Strategy, StrategyOp
from hyper_parallel.rules import Call, FunctionOp, OpSummary, OverAxes, S, Signature, first_derivative_only, wide_dtype
from hyper_parallel_ops_basic.losses.class_parallel import (
    ClassShard,
    Labels,
    Terms,
    exchanged,
    index_losses,
    pick,
    score_sum,
    scores_gradient,
)
from hyper_parallel_ops_basic.losses.cross_entropy import (
    reduced_losses,
    unknown_targets,
    weight_is_sharded,
    weight_placement,
)
from hyper_parallel_ops_basic.losses.loss_reduction import reduction_of
from hyper_parallel_ops_basic.values.autocast import loss_dtype

_EFFICIENT_ROWS = 256  # with fewer, a product spends its time on reading the weight


class LinearCrossEntropy(FunctionOp):
    """``F.linear_cross_entropy``. Without ``options`` it is ``linear`` and then ``cross_entropy``, as in PyTorch; with
    them it runs in chunks, with label smoothing and any number of batch dims too. Class probabilities and K-dimensional
    losses have no chunks."""

    summary = OpSummary(
        "rows, and classes with weight and bias; features as those of `linear`",
        communicates="that of `linear` and `cross_entropy`, for all chunks together",
        whole="with `options` the features: a chunk's scores are used where they are made",
    )

    signature = Signature(
        "input, linear_weight, target, *, linear_bias, weight, reduction, ignore_index, label_smoothing, options"
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = self.signature.bind(args, kwargs)
        x, matrix, target = given["input"], given["linear_weight"], given["target"]
        bias, options = given.get("linear_bias"), given.get("options")
        rules: dict[str, Any] = {k: given[k] for k in ("weight", "reduction", "label_smoothing") if k in given}
        scores_shape = (*x.shape[:-1], *matrix.shape[:-1])
        probabilities = tuple(target.shape) == scores_shape
        if given.get("ignore_index") is not None:
            if probabilities:
                raise RuntimeError("ignore_index cannot be specified when target contains probabilities")
            rules["ignore_index"] = given["ignore_index"]
        chunked = options is not None and not probabilities and matrix.ndim == 2
        if x.ndim < 1 or (x.ndim > 2 and not chunked) or matrix.ndim < 2 or x.shape[-1] != matrix.shape[-1]:
            raise RuntimeError(
                "linear_cross_entropy takes an input of shape (features), (rows, features) or, in chunks, "
                "(..., features) and a weight of shape (classes, ..., features), got "
                f"{tuple(x.shape)} and {tuple(matrix.shape)}"
            )
        if chunked:
            return in_chunks(x, matrix, target, bias, options=options, **rules)
        if matrix.ndim > 2:
            matrix = matrix.reshape(-1, matrix.shape[-1])
            bias = None if bias is None else bias.reshape(-1)
        return F.cross_entropy(F.linear(x, matrix, bias).reshape(scores_shape), target, **rules)


def in_chunks(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> torch.Tensor:
    """The chunked form, for class indices: input ``(..., features)``, target ``(...)``. The rule of DTensors is
    :class:`ChunkedLinearCrossEntropy`; plain tensors take PyTorch's."""
    tensors = (input, linear_weight, target, linear_bias, weight)
    rules: dict[str, Any] = {
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    if has_torch_function(tensors):
        return handle_torch_function(in_chunks, tensors, *tensors, options=options, **rules)
    if target.shape != input.shape[:-1]:
        raise ValueError(f"expected a target of shape {tuple(input.shape[:-1])}, got {tuple(target.shape)}")
    losses = F.linear_cross_entropy(
        input.reshape(-1, input.shape[-1]),
        linear_weight,
        target.reshape(-1),
        linear_bias=linear_bias,
        weight=weight,
        options=None if linear_weight.is_meta else options,
        **rules,
    )
    return losses if losses.ndim == 0 else losses.reshape(target.shape)


class ChunkedLinearCrossEntropy(StrategyOp):
    """:func:`in_chunks`: rows and classes sharded, over any mesh axes.

    Costs what :class:`.CrossEntropy` of the scores costs (two all-reduces where
    classes are sharded, however many chunks), and backward the input's and the weight's own reductions.
    """

    summary = OpSummary(
        "rows, and classes with weight and bias",
        communicates="as `cross_entropy`, once for all chunks | the reductions of input and weight",
        whole="features: a chunk's scores are used where they are made",
    )

    signature = (
        "input, linear_weight, target, linear_bias=None, weight=None, reduction='mean', ignore_index=-100, "
        "label_smoothing=0.0, options=None"
    )

    def strategies(self, call: Call) -> Iterable[Strategy]:
        reduction = reduction_of(call.arg)
        for d in range(len(call.spec("target").shape)):
            out = {"none": S(d), "mean": Replicate()}.get(reduction, Partial())
            yield Strategy({"input": S(d), "target": S(d)}, out)
        row = {"linear_weight": S(0), "linear_bias": S(0), "weight": weight_placement(call)}
        yield Strategy(row, Replicate())

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        layout = targets[call.position("linear_weight")]
        shape = tuple(call.spec("linear_weight").shape)
        rows = call.spec("target").shape
        rows_over = OverAxes(targets[call.position("target")], range(len(rows)))
        classes = replace(ClassShard.of(layout, shape, 0, weight_is_sharded(call, targets)), dim=1)
        reduction, elements, arguments = reduction_of(call.arg), rows.numel(), self.arguments

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            matrix, target = given["linear_weight"], given["target"]
            x = given["input"].reshape(target.numel(), matrix.shape[1])
            ignored = given.get("ignore_index", -100)
            unknown = unknown_targets(target, ignored, classes.count)
            chunk = rows_per_chunk(given["options"], len(x), *matrix.shape)
            losses, weights = index_losses(
                lambda labels: _LinearTerms.apply(x, matrix, given.get("linear_bias"), classes, labels, chunk),
                target.masked_fill(unknown, ignored).flatten(),
                given.get("weight"),
                classes,
                ignored,
                given.get("label_smoothing", 0.0),
            )
            losses, weights = losses.view(target.shape), weights.view(target.shape)
            return reduced_losses(losses, weights, reduction, rows_over, elements, unknown).to(loss_dtype(x))

        return local


def rows_per_chunk(options: Any, rows: int, classes: int, features: int) -> int:
    """How many rows a chunk has, by ``torch.nn.LinearCrossEntropyOptions``. Without a number: as many as make a chunk's
    scores as large as the input, in a power of two, over the factor of ``"aspect_ratio:N"``; for ``"auto"`` half of
    that, but enough for an efficient product.

    Each rank's own decision, as chunks do not communicate.
    """
    if options.batch_chunk_size is not None or options.chunking_method is None:
        return max(options.batch_chunk_size or rows, 1)
    fitting = 1 << max(-(-rows * features // max(classes, features, 1)) - 1, 0).bit_length()
    if options.chunking_method == "auto":
        return max(fitting // 2, _EFFICIENT_ROWS)
    return max(fitting // int(options.chunking_method.partition(":")[2] or 1), 1)


class _LinearTerms(torch.autograd.Function):
    """The terms of the scores ``F.linear(x, matrix, bias)``, chunk by chunk. Two all-reduces, none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        classes: ClassShard,
        labels: Labels,
        rows: int,
    ) -> Terms:
        kind = _autocast_dtype(x)
        chunks = _Chunks(x, matrix, bias, rows, kind)
        # Of each row: the largest score, and the others relative to it.
        top, exponentials, picked, scores = (x.new_zeros(len(x), dtype=chunks.wide) for _ in range(4))
        for part, found in chunks:
            place, here = labels.place[part], labels.here[part]
            most = found.amax(1) if found.shape[1] else found.new_full((len(found),), -torch.inf)
            top[part] = most
            lower = found.to(chunks.wide).sub_(_finite(top[part]).unsqueeze(1))
            picked[part] = pick(lower, 1, place, here)
            if labels.smooth:
                scores[part] = score_sum(lower, 1, labels.weight)
            exponentials[part] = lower.exp_().sum(1)
        highest = classes.over.extreme(top, "max")
        shift = _finite(top) - highest
        # A rank without classes, or with scores of -inf only, has nothing to scale.
        exponentials = torch.where(exponentials == 0, 0, exponentials * shift.exp())
        picked += torch.where(labels.here, shift, 0)
        if labels.smooth:
            scores += shift * (len(matrix) if labels.weight is None else labels.weight.sum(dtype=scores.dtype))
        terms = exchanged(classes, labels, exponentials, picked, scores if labels.smooth else None)
        ctx.save_for_backward(x, matrix, bias, highest, terms[0], labels.place, labels.here, labels.weight)
        ctx.args = (rows, kind, labels.smooth)
        ctx.mark_non_differentiable(*(t for t in terms[3:] if t is not None))
        return terms

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, to_lse: torch.Tensor, to_picked: torch.Tensor, to_scores: Any, *_: Any) -> tuple[Any, ...]:
        x, matrix, bias, top, lse, place, here, weight = ctx.saved_tensors
        rows, kind, smooth = ctx.args
        chunks = _Chunks(x, matrix, bias, rows, kind)
        to_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        # Sums over chunks are kept in float32, as one product over all rows keeps them.
        to_matrix = torch.zeros_like(matrix, dtype=chunks.wide) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias, dtype=chunks.wide) if ctx.needs_input_grad[2] else None
        for part, found in chunks:
            labels = Labels(place[part], here[part], weight, smooth)
            spread = to_scores[part] if smooth else None
            grad = scores_gradient(found, top[part], lse[part], 1, labels, to_lse[part], to_picked[part], spread)
            if to_bias is not None:
                to_bias += grad.sum(0)
            grad = grad.to(found.dtype)
            if to_x is not None:
                to_x[part] = grad @ chunks.matrix
            if to_matrix is not None:
                if grad.dtype is to_matrix.dtype:
                    to_matrix.addmm_(grad.T, chunks.x[part])
                else:
                    to_matrix += grad.T @ chunks.x[part]
        return (
            to_x,
            None if to_matrix is None else to_matrix.to(matrix.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *[None] * 3,
        )


class _Chunks:
    """Iterates over (slice of rows, their scores), computed as they are asked for."""

    def __init__(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, rows: int, kind: torch.dtype | None
    ) -> None:
        # As autocast would cast them; in the backward it is off.
        self.x, self.matrix = (t if kind is None else t.to(kind) for t in (x, matrix))
        self.bias = bias if bias is None or kind is None else bias.to(kind)
        self.rows = rows
        self.wide = wide_dtype(self.x.dtype)

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for start in range(0, len(self.x), self.rows):
            part = slice(start, start + self.rows)
            with torch.autocast(self.x.device.type, enabled=False):
                scores = F.linear(self.x[part], self.matrix, self.bias)
            yield part, scores


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64 else None


def _finite(top: torch.Tensor) -> torch.Tensor:
    """0 in the place of an infinite maximum, so that nothing is infinity less infinity."""
    return torch.where(top.isinf(), 0, top)
