"""Cross entropy of scores whose classes are sharded: each rank keeps to its own classes.

After Megatron-LM (Shoeybi et al. 2019, section 3): the ranks exchange the maximum, and the sum of exponentials with the
target's score, per element. The softmax is computed again in the backward, so the scores are all that is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.boxes import Intervals
from hyper_parallel.families.derivatives import first_derivative_only
from hyper_parallel.families.over_axes import OverAxes

from .softmax import shifted


def class_parallel_losses(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    over: OverAxes,
    dim: int,
    held: Intervals,
    classes: int,
    ignored: int,
    smoothing: float,
    weight_sharded: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss of every element (float32 or wider, equal on the ranks of ``over``), and what each counts in a mean.

    Args:
        x: scores, of which this rank holds the classes ``held`` of ``classes`` along ``dim``.
        target: class indices, or probabilities sharded like ``x`` (then nothing is returned for the mean).
        weight: per class, whole or sharded like the classes.
        over: the mesh axes that shard the classes.
    """
    if weight is not None:
        weight = weight.detach()
        mine = weight if weight_sharded else torch.cat([weight[:0], *(weight[a:b] for a, b in held)])
    else:
        mine = None
    if target.shape == x.shape:
        return _soft(x, target, mine, over, dim, classes, smoothing), None
    valid = target != ignored
    if x.device.type in ("cpu", "cuda"):
        inside = (target >= 0) & (target < classes)
        torch._assert_async(
            (inside | ~valid).all(), f"cross_entropy: a target is out of bounds of the {classes} classes"
        )
    place, here = locate(target, held)
    here = here & valid
    lse, picked, scores, weights, weight_sum = _Terms.apply(
        x, over, dim, place, here, mine, smoothing > 0, weight_sharded
    )
    if weight is None:
        weights, weight_sum = valid.to(lse.dtype), classes
    elif not weight_sharded:
        weights = torch.where(valid, weight[torch.where(valid, target, 0)], 0)
        weight_sum = weight.sum()
    losses = (lse - picked) * weights
    if smoothing > 0:
        part = smoothing / classes
        losses = (1 - smoothing) * losses + part * torch.where(valid, lse * weight_sum - scores, 0)
    return torch.where(valid, losses, 0), weights


class _Terms(torch.autograd.Function):
    """Per element, relative to its maximum: log of the sum of exponentials, the target's score, the (weighted) sum of
    scores; and, of sharded weights, the target's and their sum. Two all-reduces, none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        over: OverAxes,
        dim: int,
        place: torch.Tensor,
        here: torch.Tensor,
        weight: torch.Tensor | None,
        smooth: bool,
        weight_sharded: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        lower, top = shifted(x, over, dim)
        some = x.shape[dim] > 0
        exchange = {"picked": torch.zeros(here.shape, dtype=lower.dtype, device=x.device)}
        if some:
            exchange["picked"] = torch.where(here, lower.gather(dim, place.unsqueeze(dim)).squeeze(dim), 0)
        if smooth:
            whole = lower.sum(dim) if weight is None else lower.movedim(dim, -1) @ weight.to(lower.dtype)
            exchange["scores"] = whole
        if weight_sharded and weight is not None:
            found = torch.where(here, weight[place], 0) if some else torch.zeros_like(exchange["picked"])
            exchange["weight"] = found.to(lower.dtype)
            exchange["weight_sum"] = weight.sum(dtype=lower.dtype)
        exchange["exponentials"] = lower.exp_().sum(dim)
        buffer = over.sum(torch.cat([part.reshape(-1) for part in exchange.values()]))
        parts = buffer.split([part.numel() for part in exchange.values()])
        sums = {name: part.view(exchange[name].shape) for name, part in zip(exchange, parts, strict=True)}
        lse = sums["exponentials"].log()
        ctx.save_for_backward(x, lse + top.squeeze(dim), place, here, weight if smooth else None)
        ctx.dim = dim
        results = (lse, sums["picked"].clone(), sums.get("scores"), sums.get("weight"), sums.get("weight_sum"))
        ctx.mark_non_differentiable(*(t for t in results[3:] if t is not None))
        return results

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, to_lse: torch.Tensor, to_picked: torch.Tensor, to_scores: Any, *_: Any) -> tuple[Any, ...]:
        x, lse, place, here, weight = ctx.saved_tensors
        dim = ctx.dim
        out = (x.to(lse.dtype) - lse.unsqueeze(dim)).exp_().mul_(to_lse.unsqueeze(dim))
        if to_scores is not None:
            spread = to_scores.unsqueeze(dim)
            out += spread if weight is None else spread * _along(weight, dim, x.ndim)
        if x.shape[dim]:
            out.scatter_add_(dim, place.unsqueeze(dim), torch.where(here, to_picked, 0).unsqueeze(dim))
        return out.to(x.dtype), *[None] * 7


def _soft(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    over: OverAxes,
    dim: int,
    classes: int,
    smoothing: float,
) -> torch.Tensor:
    """The losses for target probabilities; differentiable in both."""
    lower, _ = shifted(x, over, dim)
    wanted = target.to(lower.dtype)
    if smoothing > 0:
        wanted = wanted * (1 - smoothing) + smoothing / classes
    if weight is not None:
        wanted = wanted * _along(weight, dim, x.ndim)
    sums = over.sum(torch.stack([lower.exp().sum(dim), (wanted * lower).sum(dim), wanted.sum(dim)]))
    return sums[0].log() * sums[2] - sums[1]


def _along(weight: torch.Tensor, dim: int, ndim: int) -> torch.Tensor:
    return weight.view([-1 if d == dim else 1 for d in range(ndim)])


def locate(target: torch.Tensor, held: Intervals) -> tuple[torch.Tensor, torch.Tensor]:
    """Local position of each class index (0 where it is elsewhere), and whether it is here."""
    place, mine, offset = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.bool), 0
    for start, stop in held:
        inside = (target >= start) & (target < stop)
        place = torch.where(inside, target - (start - offset), place)
        mine, offset = mine | inside, offset + stop - start
    return place, mine
