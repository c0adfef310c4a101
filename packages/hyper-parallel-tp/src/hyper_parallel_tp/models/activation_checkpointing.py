"""Activation checkpointing of blocks: what they keep for backward, and what they compute again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hyper_parallel.rules import forward_function, set_forward

__all__ = ["MODES", "checkpoint_blocks"]

MODES = ("none", "full", "selective")

_KEPT = {
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}
"""What selective checkpointing keeps: what costs much to compute again."""


def checkpoint_blocks(model: nn.Module, blocks: Mapping[str, nn.Module], mode: str) -> None:
    """Checkpoint the blocks of a model.

    A ``transformers`` model does it by itself, as it knows what of a block's arguments is a cache.

    Raises:
        ValueError: an unknown mode, or a model without blocks.
    """
    if mode not in MODES:
        raise ValueError(f"parallelize: checkpointing is one of {', '.join(MODES)}, got {mode!r}")
    if mode == "none":
        return
    if not blocks:
        raise ValueError(f"parallelize: checkpointing={mode!r}, and {type(model).__name__} has no list of blocks")
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    own: Any = getattr(model, "gradient_checkpointing_enable", None)
    if own is not None and getattr(model, "supports_gradient_checkpointing", True):
        own(gradient_checkpointing_kwargs=options)
        return
    for block in blocks.values():
        _checkpoint(block, options)


def _checkpoint(block: nn.Module, options: dict[str, Any]) -> None:
    inner = forward_function(block)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return inner(self, *args, **kwargs)
        return checkpoint(inner, self, *args, **options, **kwargs)

    set_forward(block, forward)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.name() in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
