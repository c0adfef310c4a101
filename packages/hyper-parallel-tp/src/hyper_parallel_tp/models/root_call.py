"""What a whole model does besides: divide its loss by the tokens of all data ranks, and keep no cache in training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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
    """Change a model of ``transformers``; others stay as they are.

    Args:
        model: the model, without adapters around it.
        dims: whose data ranks share a loss.
    """
    arguments = inspect.signature(model.forward).parameters
    if not hasattr(model, "config") or "labels" not in arguments:
        return
    if "use_cache" in arguments:
        _keep_no_cache_in_training(model)
    # In the loss and not at the model's inputs: not every model hands on what it is told about a number of tokens.
    loss: Any = getattr(model, "loss_function", None)
    if dims.sizes()["batch"] > 1 and getattr(loss, "__name__", "") == _COUNTED_LOSS:
        owner: Any = model
        owner.loss_function = _over_all_ranks(loss, dims)


def _keep_no_cache_in_training(model: nn.Module) -> None:
    inner = forward_function(model)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            kwargs.setdefault("use_cache", False)
        return inner(self, *args, **kwargs)

    set_forward(model, forward)


def _over_all_ranks(loss: Callable[..., Any], dims: ParallelDims) -> Callable[..., Any]:
    """A loss of this rank's tokens, whose mean over the data ranks is that over all tokens, however they are spread."""
    mesh = dims.get_mesh("batch")

    @functools.wraps(loss)
    def counted(logits: Any, labels: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        shifted = kwargs.get("shift_labels")
        counts = labels if shifted is None else shifted
        if num_items_in_batch is None and not args[1:] and not isinstance(counts, DTensor):
            # Each token is compared with the label of the next one, so the first label is not used.
            used = counts[..., 1:] if shifted is None else counts
            tokens = count_tokens(used, kwargs.get("ignore_index", -100), mesh=mesh)
            num_items_in_batch = tokens.clamp(min=1) / mesh.size()
        if num_items_in_batch is not None:
            kwargs["num_items_in_batch"] = num_items_in_batch
        return loss(logits, labels, *args, **kwargs)

    return counted
