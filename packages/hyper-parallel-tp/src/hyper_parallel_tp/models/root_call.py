"""What a whole model's forward does besides: count the tokens of all data ranks, and keep no cache in training."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from hyper_parallel import DTensor
from hyper_parallel.rules import forward_function, set_forward
from hyper_parallel_tp.loss.losses import count_tokens
from hyper_parallel_tp.parallel_dims import ParallelDims

__all__ = ["adapt_root_call"]

_COUNTED_LOSS = "ForCausalLMLoss"
"""The loss of ``transformers`` that is divided by ``num_items_in_batch``, a number of tokens."""


def adapt_root_call(model: nn.Module, dims: ParallelDims) -> None:
    """Change the forward of a model of ``transformers``; that of others stays as it is.

    Args:
        model: the model, without adapters around it.
        dims: whose data ranks share a loss.
    """
    arguments = inspect.signature(model.forward).parameters
    if not hasattr(model, "config") or "labels" not in arguments:
        return
    counts = dims.sizes()["batch"] > 1 and _divides_by_tokens(model)
    caches = "use_cache" in arguments
    inner = forward_function(model)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if caches and self.training and torch.is_grad_enabled():
            kwargs.setdefault("use_cache", False)
        labels = kwargs.get("labels")
        if counts and labels is not None and "num_items_in_batch" not in kwargs and not isinstance(labels, DTensor):
            kwargs["num_items_in_batch"] = _tokens_per_rank(labels, dims)
        return inner(self, *args, **kwargs)

    set_forward(model, forward)


def _divides_by_tokens(model: Any) -> bool:
    """Whether the model's loss is a sum over tokens, divided by a number that it is told."""
    open_ended = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    loss = getattr(model, "loss_function", None)
    accepts = getattr(model, "accepts_loss_kwargs", True) is not False
    return open_ended and accepts and getattr(loss, "__name__", "") == _COUNTED_LOSS


def _tokens_per_rank(labels: torch.Tensor, dims: ParallelDims) -> torch.Tensor:
    """What a data rank divides the sum of its losses by, so that the mean over ranks is the mean over all tokens.

    ``transformers`` compares each token with the label of the next one; the first label is not used.
    """
    mesh = dims.get_mesh("batch")
    return count_tokens(labels[..., 1:], mesh=mesh).clamp(min=1) / mesh.size()
