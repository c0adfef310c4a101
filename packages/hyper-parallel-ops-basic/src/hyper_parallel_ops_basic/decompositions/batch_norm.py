"""``F.batch_norm`` and ``F.instance_norm`` in terms of other functions; see :mod:`.composed`.

Statistics are those of the whole batch, wherever its samples lie (what ``SyncBatchNorm`` does on purpose): over sharded
dims two small all-reduces forward. Running statistics are updated as on one device.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hyper_parallel.rules import wide

Tensor = torch.Tensor


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``[batch, channels, ...]`` normalised per channel."""
    if input.ndim < 2:
        if input.numel():
            raise RuntimeError(f"batch_norm takes an input of [batch, channels, ...], got {tuple(input.shape)}")
        return input.clone()
    dims = [d for d in range(input.ndim) if d != 1]
    if not training:
        assert running_mean is not None, "batch_norm in evaluation mode needs running statistics"
        assert running_var is not None
        return _normalised(input, running_mean, running_var, weight, bias, eps)
    count = math.prod(input.shape[d] for d in dims)
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    var, mean = torch.var_mean(wide(input), dims, correction=0)
    _update(running_mean, mean, momentum)
    _update(running_var, var * (count / max(count - 1, 1)), momentum)
    return _normalised(input, mean, var, weight, bias, eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``[batch, channels, ...]`` normalised per sample and channel."""
    if not use_input_stats:
        assert running_mean is not None, "instance_norm without input statistics needs running ones"
        assert running_var is not None
        return _normalised(input, running_mean, running_var, weight, bias, eps)
    dims = list(range(2, input.ndim))
    count = math.prod(input.shape[d] for d in dims)
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {tuple(input.shape)}")
    var, mean = torch.var_mean(wide(input), dims, correction=0)
    _update(running_mean, mean.mean(0), momentum)
    _update(running_var, (var * (count / max(count - 1, 1))).mean(0), momentum)
    return _normalised(input, mean, var, weight, bias, eps).contiguous()


@torch.no_grad()
def _update(running: Tensor | None, new: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_((momentum * new).to(running.dtype))


def _normalised(x: Tensor, mean: Tensor, var: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
    """Statistics per channel, or per sample and channel, spread over the other dims."""

    def spread(t: Tensor) -> Tensor:
        shape = tuple(t.shape) if t.ndim == 2 else (1, *t.shape)
        return t.reshape(shape + (1,) * (x.ndim - 2))

    out = (wide(x) - spread(mean)) * (spread(var) + eps).rsqrt()
    if weight is not None:
        out = out * spread(weight)
    return (out if bias is None else out + spread(bias)).to(x.dtype)
