"""Cross entropy of scores whose classes are sharded: each rank keeps to its own classes.

After Megatron-LM (Shoeybi et al. 2019, section 3): the ranks exchange the maximum, and the sum of exponentials with the
target's score, per element. The softmax is computed again in the backward, so the scores are all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel import Layout
from hyper_parallel.rules import Intervals, OverAxes, dim_intervals, first_derivative_only, kept, locate
from hyper_parallel_ops_basic.normalization.softmax import shifted


@dataclass(frozen=True)
class ClassShard:
    """The classes that this rank holds.

    Attributes:
        over: the mesh axes that shard the classes; all collectives are over these.
        dim: the dim of the classes.
        held: global indices of this rank's classes.
        count: number of all classes.
        weight_sharded: whether a weight per class is sharded like the classes; else every rank has all of it.
    """

    over: OverAxes
    dim: int
    held: Intervals
    count: int
    weight_sharded: bool

    @classmethod
    def of(cls, layout: Layout, shape: tuple[int, ...], dim: int, weight_sharded: bool) -> ClassShard:
        """The part of dim ``dim`` of a tensor of this layout and global shape."""
        held = dim_intervals(layout, shape, dim, layout.info.my_coordinate())
        return cls(OverAxes(layout, [dim]), dim, held, shape[dim], weight_sharded)

    def weight_here(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        """The weights of this rank's classes."""
        if weight is None or self.weight_sharded:
            return weight
        return torch.cat([weight[:0], *(weight[a:b] for a, b in self.held)])


@dataclass(frozen=True)
class Labels:
    """Class indices as this rank sees them.

    Attributes:
        place: position among this rank's classes; 0 where the class is elsewhere.
        here: whether the class is one of this rank's, and is not ignored.
        weight: of this rank's classes, or None.
        smooth: whether smoothing wants the sum of all scores.
    """

    place: torch.Tensor
    here: torch.Tensor
    weight: torch.Tensor | None
    smooth: bool


# Per element, relative to its maximum: log of the sum of exponentials, the target's score, the (weighted) sum of scores
# (None without smoothing); of sharded weights, the target's and their sum (else None).
Terms = tuple[Any, ...]


def class_parallel_losses(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    classes: ClassShard,
    ignored: int,
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss of every element (float32 or wider, equal on the ranks of ``classes.over``), and what each counts in a
    mean.

    Args:
        x: scores of this rank's classes.
        target: class indices, or probabilities sharded like ``x`` (then nothing is returned for the mean).
        weight: per class, whole or sharded like the classes.
    """
    if target.shape == x.shape:
        weight = classes.weight_here(None if weight is None else weight.detach())
        return _SoftLosses.apply(x, target, weight, classes, smoothing), None
    return index_losses(lambda labels: _Terms.apply(x, classes, labels), target, weight, classes, ignored, smoothing)


def index_losses(
    terms_of: Callable[[Labels], Terms],
    target: torch.Tensor,
    weight: torch.Tensor | None,
    classes: ClassShard,
    ignored: int,
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses for class indices from their terms, and what each counts in a mean. All targets are classes, or
    ignored."""
    valid = target != ignored
    weight = None if weight is None else weight.detach()
    place, here = locate(target, classes.held)
    labels = Labels(place, here & valid, classes.weight_here(weight), smoothing > 0)
    lse, picked, scores, weights, weight_sum = terms_of(labels)
    if weight is None:
        weights, weight_sum = valid.to(lse.dtype), classes.count
    elif not classes.weight_sharded:
        weights = torch.where(valid, weight[torch.where(valid, target, 0)], 0)
        weight_sum = weight.sum()
    losses = (lse - picked) * weights
    if smoothing > 0:
        part = smoothing / classes.count
        losses = (1 - smoothing) * losses + part * torch.where(valid, lse * weight_sum - scores, 0)
    return torch.where(valid, losses, 0), weights


class _Terms(torch.autograd.Function):
    """The terms of scores that are there. Two all-reduces, none backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, classes: ClassShard, labels: Labels) -> Terms:
        dim, weight = classes.dim, labels.weight
        lower, top = shifted(x, classes.over, dim)
        picked = pick(lower, dim, labels.place, labels.here)
        scores = score_sum(lower, dim, weight) if labels.smooth else None
        terms = exchanged(classes, labels, lower.exp_().sum(dim), picked, scores)
        ctx.save_for_backward(kept(x), top.squeeze(dim), terms[0], labels.place, labels.here, weight)
        ctx.args = (dim, labels.smooth)
        ctx.mark_non_differentiable(*(t for t in terms[3:] if t is not None))
        return terms

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, to_lse: torch.Tensor, to_picked: torch.Tensor, to_scores: Any, *_: Any) -> tuple[Any, ...]:
        x, top, lse, place, here, weight = ctx.saved_tensors
        dim, smooth = ctx.args
        labels = Labels(place, here, weight, smooth)
        return scores_gradient(x, top, lse, dim, labels, to_lse, to_picked, to_scores).to(x.dtype), None, None


def pick(lower: torch.Tensor, dim: int, place: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """The target's score where its class is here, else 0."""
    if not lower.shape[dim]:
        return torch.zeros(here.shape, dtype=lower.dtype, device=lower.device)
    return torch.where(here, lower.gather(dim, place.unsqueeze(dim)).squeeze(dim), 0)


def weight_of(weight: torch.Tensor, place: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """The weight of the target's class where this rank holds it, else 0."""
    return torch.where(here, weight[place], 0) if len(weight) else weight.new_zeros(place.shape)


def score_sum(lower: torch.Tensor, dim: int, weight: torch.Tensor | None) -> torch.Tensor:
    """The (weighted) sum of the scores of this rank's classes, in full precision under autocast too."""
    if weight is None:
        return lower.sum(dim)
    with torch.autocast(lower.device.type, enabled=False):
        return lower.movedim(dim, -1) @ weight.to(lower.dtype)


def exchanged(
    classes: ClassShard,
    labels: Labels,
    exponentials: torch.Tensor,
    picked: torch.Tensor,
    scores: torch.Tensor | None,
) -> Terms:
    """The terms from this rank's parts of them: one all-reduce of one buffer."""
    parts = {"exponentials": exponentials, "picked": picked}
    if scores is not None:
        parts["scores"] = scores
    if classes.weight_sharded and labels.weight is not None:
        weight = labels.weight.to(picked.dtype)
        parts["weight"] = weight_of(weight, labels.place, labels.here)
        parts["weight_sum"] = weight.sum()
    buffer = classes.over.sum(torch.cat([part.reshape(-1) for part in parts.values()]))
    pieces = buffer.split([part.numel() for part in parts.values()])
    # Tensors of their own: outputs that are views of one buffer could not be written to.
    sums = {name: piece.view(parts[name].shape).clone() for name, piece in zip(parts, pieces, strict=True)}
    return sums["exponentials"].log_(), sums["picked"], *map(sums.get, ("scores", "weight", "weight_sum"))


def scores_gradient(
    x: torch.Tensor,
    top: torch.Tensor,
    lse: torch.Tensor,
    dim: int,
    labels: Labels,
    to_lse: torch.Tensor,
    to_picked: torch.Tensor,
    to_scores: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of the scores ``x``, in the dtype of ``lse``; one buffer.

    Args:
        top, lse: the largest score, and the log of the sum of exponentials relative to it. Of large scores their sum
            would be the largest alone.
    """
    out = (x - top.unsqueeze(dim)).exp_().mul_((to_lse * lse.neg().exp_()).unsqueeze(dim))
    if labels.smooth and to_scores is not None:
        spread = to_scores.unsqueeze(dim)
        out += spread if labels.weight is None else spread * along(labels.weight, dim, x.ndim)
    if x.shape[dim]:
        out.scatter_add_(dim, labels.place.unsqueeze(dim), torch.where(labels.here, to_picked, 0).unsqueeze(dim))
    return out


class _SoftLosses(torch.autograd.Function):
    """The losses for target probabilities; differentiable in both, and both are all that is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        classes: ClassShard,
        smoothing: float,
    ) -> torch.Tensor:
        dim = classes.dim
        lower, top = shifted(x, classes.over, dim)
        wanted = _wanted(target, weight, classes, smoothing, lower.dtype)
        mass, dot = wanted.sum(dim), (wanted * lower).sum(dim)
        mass, dot, total = classes.over.sum(torch.stack([mass, dot, lower.exp_().sum(dim)]))
        lse = total.log_()
        ctx.save_for_backward(kept(x), target, weight, top.squeeze(dim), lse, mass.clone())
        ctx.args = (classes, smoothing)
        return lse * mass - dot

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, target, weight, top, lse, mass = ctx.saved_tensors
        classes, smoothing = ctx.args
        dim, to_x, to_target = classes.dim, None, None
        top, lse, mass, grad = (t.unsqueeze(dim) for t in (top, lse, mass, grad))
        if ctx.needs_input_grad[0]:
            to_x = (x - top).exp_().mul_(mass * lse.neg().exp_())
            to_x = to_x.sub_(_wanted(target, weight, classes, smoothing, to_x.dtype)).mul_(grad).to(x.dtype)
        if ctx.needs_input_grad[1]:
            to_target = (top - x).add_(lse).mul_(grad * (1 - smoothing))
            to_target = (to_target if weight is None else to_target * along(weight, dim, x.ndim)).to(target.dtype)
        return to_x, to_target, None, None, None


def _wanted(
    target: torch.Tensor, weight: torch.Tensor | None, classes: ClassShard, smoothing: float, dtype: torch.dtype
) -> torch.Tensor:
    """Smoothed and weighted target probabilities."""
    wanted = target.to(dtype)
    if smoothing > 0:
        wanted = wanted * (1 - smoothing) + smoothing / classes.count
    return wanted if weight is None else wanted * along(weight, classes.dim, target.ndim)


def along(weight: torch.Tensor, dim: int, ndim: int) -> torch.Tensor:
    """A weight per class, shaped to multiply scores."""
    return weight.view([-1 if d == dim else 1 for d in range(ndim)])
