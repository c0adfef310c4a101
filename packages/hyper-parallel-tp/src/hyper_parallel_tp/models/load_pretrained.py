"""``load_pretrained``: from a folder or a configuration to a model that trains, which no rank ever holds whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from hyper_parallel.checkpoint import build_on_meta, give_memory, give_values, load_safetensors
from hyper_parallel.rules import device_type_of_backend
from hyper_parallel_tp.models.parallelize import parallelize
from hyper_parallel_tp.models.pretrained_source import PretrainedSource, pretrained_source
from hyper_parallel_tp.parallel_dims import ParallelDims
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["load_pretrained"]


def load_pretrained(
    folder_or_config: str | Path | Mapping[str, Any] | Any,
    dims: ParallelDims,
    *,
    plan: Mapping[str, ParallelStyle] | None = None,
    sequence_parallel: bool | None = None,
    loss_parallel: bool | None = None,
    checkpointing: str = "none",
    mp_policy: Any = None,
    offload_policy: Any = None,
    compile: bool = False,
    dtype: torch.dtype | str | None = None,
    model_class: type[nn.Module] | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Build a model of ``transformers``, parallelise it and give it its values, each rank its own shards only.

    ::

        dims = ParallelDims(dp_shard=2, tp=4)
        model = load_pretrained("Qwen3-8B", dims)
        optimizer = torch.optim.AdamW(model.parameters())
        ...
        model.save_pretrained("tuned")  # on all ranks; any mesh, and plain transformers, reads it

    All ranks call it with the same arguments, and see the same files.

    Args:
        folder_or_config: a folder as the hub has it, of which the safetensors files are read as ``from_pretrained``
            reads them; or a folder with ``config.json`` only, a ``PreTrainedConfig`` or a dict of its settings with its
            ``model_type``: then the values are those that one device draws with ``from_config`` after
            ``torch.manual_seed`` with the seed that all ranks have set.
        dims, plan, sequence_parallel, loss_parallel, checkpointing, mp_policy, offload_policy, compile: of
            :func:`parallelize`.
        dtype: of the parameters. None or ``"auto"``: what the configuration says, or else the files.
        model_class: of ``transformers``. None: that which the configuration names, or else the one that
            ``AutoModelForCausalLM`` takes.
        trust_remote_code: run code that is in the folder.

    Returns:
        The model, in training mode.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: the files do not fit the model; it lists what.
        ValueError: weights are not in safetensors files, or quantised in a way that is not known (float8 in blocks and
            MXFP4 are given back in full), or the model is code of its own; and what :func:`parallelize` refuses.
    """
    source = pretrained_source(folder_or_config, model_class, dtype, trust_remote_code)
    model, values = build_on_meta(source.make, draw=not source.has_weights)
    if source.has_weights:
        _keep_in_float32(model)
    _read_generation_config(model, source)
    model = parallelize(
        model,
        dims,
        plan=plan,
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
        checkpointing=checkpointing,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        compile=compile,
    )
    give_memory(model, _device(offload_policy))
    if source.has_weights:
        assert source.folder is not None
        load_safetensors(model, source.folder, defaults=values)
    else:
        give_values(model, values)
    return model.train()


def _device(offload_policy: Any) -> str:
    """Where parameters are."""
    on_host = isinstance(offload_policy, CPUOffloadPolicy) or not dist.is_initialized()
    return "cpu" if on_host else device_type_of_backend()


def _keep_in_float32(model: Any) -> None:
    """Let parameters that the model keeps in float32 be read so, as by ``from_pretrained``."""
    kept = model._get_dtype_plan(model.dtype)  # noqa: SLF001 - of transformers, which has no other name for it
    if not kept:
        return
    dtypes = [(re.compile(pattern.replace("*", ".*")), dtype) for pattern, dtype in kept.items()]
    changed: dict[torch.Tensor, torch.Tensor] = {}  # hashed by identity
    for prefix, owner in model.named_modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                dtype = next((d for p, d in dtypes if p.search(f"{prefix}.{name}")), None)
                if tensor is not None and dtype is not None:
                    tensors[name] = changed.setdefault(tensor, _converted(tensor, dtype))


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    other = tensor.detach().to(dtype)
    return nn.Parameter(other, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other


def _read_generation_config(model: Any, source: PretrainedSource) -> None:
    if source.folder is not None and (source.folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = type(model.generation_config).from_pretrained(source.folder)
