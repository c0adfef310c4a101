"""Losses in terms of other functions; see :class:`hyper_parallel_ops_basic.decompositions.composed.Composed`.

The arguments are those of ``torch.nn.functional``. Means divide by global numbers of elements, so uneven shards are
exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hyper_parallel_ops_basic.losses.loss_reduction import reduction_of

Tensor = torch.Tensor
_EPSILON = 1e-12  # that of PyTorch's cosine_embedding_loss


def _reduce(losses: Tensor, options: dict[str, Any]) -> Tensor:
    reduction = reduction_of(options.get)
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, *old: Any, **options: Any
) -> Tensor:
    return _reduce((-target * (input1 - input2) + margin).clamp_min(0), _named(old, options))


def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0, *old: Any, **options: Any) -> Tensor:
    apart = torch.where(target != 1, (margin - input).clamp_min(0), 0)
    return _reduce(apart + torch.where(target != -1, input, 0), _named(old, options))


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, *old: Any, **options: Any
) -> Tensor:
    dim = target.ndim
    product = (input1 * input2).sum(dim)
    squares = [(x * x).sum(dim) + _EPSILON for x in (input1, input2)]
    cosine = product / (squares[0] * squares[1]).sqrt()
    alike = torch.where(target == 1, 1 - cosine, 0)
    return _reduce(alike + torch.where(target == -1, (cosine - margin).clamp_min(0), 0), _named(old, options))


def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    *old: Any,
    **options: Any,
) -> Tensor:
    distance = torch.nn.functional.pairwise_distance
    near, far = distance(anchor, positive, p, eps), distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, distance(positive, negative, p, eps))
    return _reduce((margin + near - far).clamp_min(0), _named(old, options))


def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    *old: Any,
    **options: Any,
) -> Tensor:
    if not input.ndim:  # of one class
        input = input.unsqueeze(0)
    index = target.unsqueeze(-1)
    terms = (margin - input.gather(-1, index) + input).clamp_min(0)
    terms = terms if p == 1 else terms * terms
    if weight is not None:
        terms = terms * weight[target].unsqueeze(-1)
    losses = terms.scatter(-1, index, 0.0).sum(-1) / input.shape[-1]
    return _reduce(losses, _named(old, options))


def multilabel_margin_loss(input: Tensor, target: Tensor, *old: Any, **options: Any) -> Tensor:
    if not input.ndim:  # of one class
        input, target = input.unsqueeze(0), target.reshape(1)
    listed = (target >= 0).to(torch.int8).cumprod(-1).bool()  # up to the first number that is no class
    classes = target.masked_fill(~listed, 0)
    wanted = torch.zeros_like(input).scatter_add(-1, classes, listed.to(input.dtype)) > 0
    terms = (1 - input.gather(-1, classes).unsqueeze(-1) + input.unsqueeze(-2)).clamp_min(0)
    counted = listed.unsqueeze(-1) & ~wanted.unsqueeze(-2)
    return _reduce(torch.where(counted, terms, 0).sum((-2, -1)) / input.shape[-1], _named(old, options))


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    if not isinstance(var, Tensor):
        var = var * torch.ones_like(input)
    if torch.any(var < 0):
        raise ValueError("var has negative entry/entries")
    if var.ndim < input.ndim and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()  # the bound takes no part in the gradient
    losses = 0.5 * (var.log() + (input - target).square() / var)
    return _reduce(losses + 0.5 * math.log(2 * math.pi) if full else losses, {"reduction": reduction})


def _named(old: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The options with those that were passed by position."""
    return dict(zip(("size_average", "reduce", "reduction"), old, strict=False)) | options
