"""State dicts and checkpoints of distributed training (docs/checkpoints.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from hyper_parallel.checkpoint.deferred.construction import build_on_meta
from hyper_parallel.checkpoint.folder import CheckpointReader, CheckpointWriter
from hyper_parallel.checkpoint.given_values import give_memory, give_values
from hyper_parallel.checkpoint.hugging_face import load_safetensors
from hyper_parallel.checkpoint.model_state import get_model_state_dict, set_model_state_dict
from hyper_parallel.checkpoint.optimizer_state import Optimizers, get_optimizer_state_dict, set_optimizer_state_dict
from hyper_parallel.checkpoint.saved_safetensors import save_safetensors
from hyper_parallel.checkpoint.saving import async_save, load, save
from hyper_parallel.checkpoint.stored_tensors import stored_dtype
from hyper_parallel.checkpoint.whole_tensors import full_tensors

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "StateDictOptions",
    "async_save",
    "build_on_meta",
    "full_tensors",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "give_memory",
    "give_values",
    "load",
    "load_safetensors",
    "save",
    "save_safetensors",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "stored_dtype",
]


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """:func:`get_model_state_dict` and :func:`get_optimizer_state_dict`."""
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizers, options=options)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """:func:`set_model_state_dict` and :func:`set_optimizer_state_dict`; returns what the first returns."""
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)
