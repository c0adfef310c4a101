"""cross_entropy and nll_loss: batch, sequence and class dims sharded, over any mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import Layout, Partial, Placement, Replicate, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, OverAxes, S, locate, torch_compat, wide_dtype
from hyper_parallel_ops_basic.indexing.lookup import Lookup
from hyper_parallel_ops_basic.losses.class_parallel import ClassShard, class_parallel_losses, weight_of
from hyper_parallel_ops_basic.losses.loss_reduction import reduction_of
from hyper_parallel_ops_basic.values.autocast import loss_dtype


class ClassLoss(StrategyOp):
    """A loss of scores of classes (dim 1, or 0 of a 1-dim input) and class indices, or class probabilities.

    Targets may hold ``ignore_index``, so the mean over class indices divides by a count that only the data tells. Where
    the targets are sharded, that count and the sum travel together: one all-reduce of two numbers, and the loss comes
    out reduced. (It is always needed: the default ignore_index -100 may occur in any targets.) A mean over
    probabilities divides by a known number and leaves a pending sum, as ``reduction="sum"`` does.
    """

    def strategies(self, call: Call) -> Iterable[Strategy]:
        shape, dense = call.spec("input").shape, self.has_probabilities(call)
        classes, reduction = class_dim(shape), reduction_of(call.arg)
        for d in range(len(shape)):
            if d == classes:
                yield from self.class_rows(call)
                continue
            kept = d - (d > classes)
            row = {"input": S(d), "target": S(d if dense else kept)}
            if reduction == "none":
                yield Strategy(row, S(kept))
            else:
                yield Strategy(row, Replicate() if reduction == "mean" and not dense else Partial())

    def has_probabilities(self, call: Call) -> bool:
        """Whether the target holds a distribution per element instead of a class index."""
        return call.spec("target").shape == call.spec("input").shape

    def class_rows(self, call: Call) -> Iterable[Strategy]:
        """Strategies that shard the classes."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define class_rows")

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        layout, shape = targets[call.index("input") or 0], tuple(call.spec("input").shape)
        dim = class_dim(shape)
        classes = ClassShard.of(layout, shape, dim, weight_is_sharded(call, targets))
        over_batch = OverAxes(layout, [d for d in range(len(shape)) if d != dim])
        if not classes.over and not over_batch:
            return None
        dense, reduction, elements = self.has_probabilities(call), reduction_of(call.arg), _elements(shape, dim)
        arguments, losses_of = self.arguments, self.losses_of

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            x, target, ignored = given["input"], given["target"], given.setdefault("ignore_index", -100)
            unknown = None if dense else unknown_targets(target, ignored, shape[dim])
            if unknown is not None:
                given["target"] = target.masked_fill(unknown, ignored)
            losses, weights = losses_of(given, classes)
            return reduced_losses(losses, weights, reduction, over_batch, elements, unknown).to(loss_dtype(x))

        return local

    def losses_of(self, given: dict[str, Any], classes: ClassShard) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of each element that this rank holds, and what each counts in a mean (None: all alike).

        Args:
            given: the local arguments by name; targets that are no class are ignored ones here.
            classes: what this rank holds of the classes.
        """
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define losses_of")


class CrossEntropy(ClassLoss):
    """``F.cross_entropy``.

    Sharded classes cost two all-reduces forward (the maximum; then the sum of exponentials, the target's score and what
    smoothing and weights need, in one buffer) and none backward, in float32 for low-precision scores.
    """

    summary = OpSummary(
        "every dim, classes too",
        communicates=(
            "mean over sharded targets: 1 all-reduce of three numbers; sharded classes: 2 all-reduces of one number "
            "per row | none"
        ),
    )

    signature = (
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
        "label_smoothing=0.0"
    )

    def class_rows(self, call: Call) -> Iterable[Strategy]:
        classes = class_dim(call.spec("input").shape)
        target: Placement = S(classes) if self.has_probabilities(call) else Replicate()
        yield Strategy({"input": S(classes), "target": target, "weight": weight_placement(call)}, Replicate())

    def losses_of(self, given: dict[str, Any], classes: ClassShard) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, target, weight, ignored = given["input"], given["target"], given.get("weight"), given["ignore_index"]
        smoothing = given.get("label_smoothing", 0.0)
        if classes.over:
            return class_parallel_losses(x, target, weight, classes, ignored, smoothing)
        losses = F.cross_entropy(x, target, weight, ignore_index=ignored, reduction="none", label_smoothing=smoothing)
        return losses, None if target.shape == x.shape else _weights(target, weight, ignored, losses.dtype)


class NLLLoss(ClassLoss):
    """``F.nll_loss``: linear in the scores, so sharded classes leave a pending sum and cost nothing; class weights that
    are sharded too cost one all-reduce, of the weights of the targets."""

    summary = OpSummary(
        "every dim, classes too, which leave a pending sum",
        communicates=(
            "mean over sharded targets: 1 all-reduce of three numbers; class weights sharded too: 1 all-reduce of one "
            "number per row | none"
        ),
    )

    signature = "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean'"

    def has_probabilities(self, call: Call) -> bool:
        return False

    def class_rows(self, call: Call) -> Iterable[Strategy]:
        row = {"input": S(class_dim(call.spec("input").shape)), "weight": weight_placement(call)}
        yield Strategy(row, Partial())

    def losses_of(self, given: dict[str, Any], classes: ClassShard) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, target, weight, ignored = given["input"], given["target"], given.get("weight"), given["ignore_index"]
        valid = target != ignored
        if weight is not None and classes.weight_sharded:
            here = weight_of(weight.detach(), *locate(target, classes.held))
            weights = torch.where(valid, classes.over.sum(here), 0)
        else:
            weights = _weights(target, weight, ignored, x.dtype)
        if not classes.over:
            return F.nll_loss(x, target, weight, ignore_index=ignored, reduction="none"), weights
        # Where, and not times zero: the gradient of a mean over nothing is 0 and not NaN.
        return torch.where(valid, -_picked(x, target, classes) * weights, 0), weights


def weight_placement(call: Call) -> Placement:
    """Of a weight per class, where the classes are sharded: on all axes alike, a whole one is looked up here, a sharded
    one by the rank that has it."""
    at = call.index("weight")
    return S(0) if at is not None and call.inputs[at].layout.shard_order[0] else Replicate()


def weight_is_sharded(call: Call, targets: Sequence[Layout]) -> bool:
    """Whether a weight per class is sharded like the classes."""
    at = call.index("weight")
    return at is not None and bool(targets[at].shard_order[0])


def class_dim(shape: Sequence[int]) -> int:
    """The dim of the classes."""
    return 0 if len(shape) == 1 else 1


def _elements(shape: Sequence[int], dim: int) -> int:
    """Global number of elements that have a loss."""
    return torch.Size(n for d, n in enumerate(shape) if d != dim).numel()


def unknown_targets(target: torch.Tensor, ignored: int, classes: int) -> torch.Tensor:
    """Where a target is no class, which is an error on every rank wherever it is."""
    return ((target < 0) | (target >= classes)) & (target != ignored)


def _refuse_unknown(count: torch.Tensor) -> None:
    """Raise when targets that are no class were counted on some rank.

    Raises:
        IndexError: on accelerators an assertion of the device, as in PyTorch.
    """
    if count.device.type != "cpu":
        torch_compat.assert_async(count == 0)
    elif count:
        raise IndexError(f"Target out of bounds: {int(count)} of the targets, on one rank or several, are no class")


def _weights(target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    """What each element counts in the mean: its class's weight, or 0 where it is ignored."""
    valid = target != ignored
    if weight is None:
        return valid.to(dtype)
    return torch.where(valid, weight.detach()[torch.where(valid, target, 0)], 0)


def reduced_losses(
    losses: torch.Tensor,
    weights: torch.Tensor | None,
    reduction: str,
    over: OverAxes,
    elements: int,
    unknown: torch.Tensor | None = None,
) -> torch.Tensor:
    """The losses reduced: with ``weights``, a mean that is reduced over the ranks too; else this rank's term.

    Args:
        unknown: where a target is no class. A mean counts them with its sums; otherwise the CPU, whose kernels raise
            where PyTorch's other devices assert, asks all ranks (one all-reduce of a number).
    """
    dtype = wide_dtype(losses.dtype)
    found = losses.new_zeros((), dtype=dtype) if unknown is None else unknown.sum(dtype=dtype)
    if reduction == "mean" and weights is not None:
        sums = over.sum(torch.stack([losses.sum(dtype=dtype), weights.sum(dtype=dtype), found]))
        _refuse_unknown(sums[2].detach())
        return sums[0] / sums[1]
    if unknown is not None:
        _refuse_unknown(over.sum(found) if losses.device.type == "cpu" else found)
    if reduction == "none":
        return losses
    total = losses.sum(dtype=dtype)
    return total if reduction == "sum" else total / elements


def _picked(x: torch.Tensor, target: torch.Tensor, classes: ClassShard) -> torch.Tensor:
    """The target's score where this rank holds its class, else 0."""
    dim = classes.dim
    place, mine = (t.unsqueeze(dim) for t in locate(target, classes.held))
    return Lookup.apply(x, dim, place, mine, classes.over.layout).squeeze(dim)
