"""Kernels that PyTorch's own layers and compiled graphs call by name, in terms of the functions that users call; see
:mod:`hyper_parallel_ops_basic.decompositions.composed`.

Statistics that a norm returns beside its result are computed anew; as in PyTorch only those of group_norm have a
gradient.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel_ops_basic.decompositions.composed import lying_like

Tensor = torch.Tensor
Maybe = Tensor | None


def _softmax(input: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return F.softmax(input, dim, dtype=torch.float32 if half_to_float else None)


def _log_softmax(input: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return F.log_softmax(input, dim, dtype=torch.float32 if half_to_float else None)


# -- norms with their statistics -------------------------------------------------------------------------------------


def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out = F.layer_norm(input, normalized_shape, weight, bias, eps)
    return out, *_statistics(input.detach(), list(range(-len(normalized_shape), 0)), eps, keepdim=True)


def native_group_norm(
    input: Tensor, weight: Maybe, bias: Maybe, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = input.unflatten(1, (group, C // group))
    out = lying_like(input, F.group_norm(input, group, weight, bias, eps))
    return out, *_statistics(rows, list(range(2, rows.ndim)), eps)


def native_batch_norm(
    input: Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    out = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        return out, input.new_empty(0), input.new_empty(0)
    return out, *_statistics(input.detach(), [d for d in range(input.ndim) if d != 1], eps)


def _statistics(x: Tensor, dims: list[int], eps: float, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=keepdim)
    return mean, (var + eps).rsqrt()


# -- the same with other arguments ----------------------------------------------------------------------------------


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    padding = None if padding_idx == -1 else padding_idx
    return F.embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Maybe,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    rank = weight.ndim - 2
    if transposed:
        turned = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        return turned(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return (F.conv1d, F.conv2d, F.conv3d)[rank - 1](input, weight, bias, stride, padding, dilation, groups)


def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(input.detach(), dtype=torch.bool)
    if train is False:
        return input.clone(), mask.fill_(True)
    mask = mask.bernoulli_(1 - p)
    return input * mask * (0 if p == 1 else 1 / (1 - p)), mask


# -- of torch.ops.aten only -------------------------------------------------------------------------------------------


def _unsafe_view(input: Tensor, size: Sequence[int]) -> Tensor:
    return input.view(size)


def alias(input: Tensor) -> Tensor:
    return input.view(input.shape)


def index(input: Tensor, indices: Sequence[Any]) -> Tensor:
    return input[tuple(builtins.slice(None) if i is None else i for i in indices)]


def slice(input: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    return input[(builtins.slice(None),) * (dim % input.ndim) + (builtins.slice(start, end, step),)]
