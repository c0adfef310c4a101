"""``save_pretrained`` of a ``transformers`` model that is spread: all ranks write together what one device writes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.saved_safetensors import Attempts, raise_everywhere, save_safetensors

__all__ = ["save_spread_model"]

_PLAIN: Mapping[str, Any] = {
    "push_to_hub": False,
    "variant": None,
    "save_original_format": True,
    "distributed_checkpoint": False,
}
"""Arguments of ``save_pretrained`` that have to be as they are by default."""

_HOW = {
    "push_to_hub": "save it, then on rank 0: huggingface_hub.upload_folder(folder_path=..., repo_id=...)",
    "variant": "save it, and rename the files",
    "save_original_format": "hyper_parallel.checkpoint.save for the names and pieces of the model",
    "distributed_checkpoint": "hyper_parallel.checkpoint.save, which each rank writes its shards with",
}


def save_spread_model(model: Any, folder: Any, max_shard_size: int | str, options: Mapping[str, Any]) -> None:
    """Write safetensors files, configuration and generation configuration. All ranks call it, rank 0 writes, one tensor
    at a time.

    Args:
        model: of ``transformers``, with DTensors.
        folder: is made when it is missing.
        max_shard_size: of :func:`save_safetensors`.
        options: the other arguments of ``save_pretrained``.

    Raises:
        NotImplementedError: an argument that only one device knows.
        CheckpointError: on every rank, when rank 0 could not write.
    """
    for name, value in options.items():
        if name in _PLAIN and value != _PLAIN[name]:
            raise NotImplementedError(f"save_pretrained({name}={value!r}) of a model that is spread: {_HOW[name]}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise NotImplementedError(
            "save_pretrained of a model that is spread and has adapters of load_adapter: wrap it with peft's "
            "get_peft_model, and save get_peft_model_state_dict(model, hyper_parallel.checkpoint.get_model_state_dict("
            "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))) on rank 0"
        )
    writing = Attempts()
    writing.attempt(_write_configuration, model, Path(folder))
    raise_everywhere(writing.error, folder)
    save_safetensors(model, folder, max_shard_size=max_shard_size)


def _write_configuration(model: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        sys.modules["transformers.dynamic_module_utils"].custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
