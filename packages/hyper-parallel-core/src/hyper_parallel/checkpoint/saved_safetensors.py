"""Write models as Hugging Face safetensors files: ``model.safetensors``, or shards of a largest size and their index.

The names are those of the module's state dict; for a model of ``transformers`` those of its ``save_pretrained``
(:mod:`~hyper_parallel.checkpoint.stored_names`). Needs ``safetensors`` and ``huggingface_hub`` (the extra
``safetensors`` of this package).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.checkpoint.file_tensors import FileTensor, GatheredValue, file_tensors
from hyper_parallel.checkpoint.model_state import canonical, ties
from hyper_parallel.checkpoint.replaced_export import (
    INDEX,
    discard_unfinished,
    finish_replacing,
    replace_export,
    write_text,
)
from hyper_parallel.checkpoint.safetensors_file import SafetensorsFile, incomplete, library, nbytes
from hyper_parallel.checkpoint.whole_tensors import full_tensors, rank
from hyper_parallel.errors import CheckpointError

__all__ = ["Attempts", "raise_everywhere", "save_safetensors"]

PATTERN = "model{suffix}.safetensors"


def save_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a module's parameters and persistent buffers as safetensors files. All ranks call it, rank 0 writes.

    One tensor is gathered and written at a time, so rank 0 never holds more than one. Tied tensors are written once,
    under their first name. An older export is replaced when all new files are written, as a whole: whatever dies
    meanwhile, :func:`load_safetensors` finds the old or the new one.

    Args:
        model: any module; what is sharded in it is a DTensor.
        folder: made when it is missing; other files in it stay.
        max_shard_size: bytes, or ``"200MB"``, ``"5GB"`` (powers of ten). A larger tensor has a file of its own.
        metadata: goes into each file beside ``{"format": "pt"}``.

    Raises:
        CheckpointError: on every rank, when rank 0 could not write.
        TypeError: the state dict has an entry that is no tensor.
    """
    hub = library("huggingface_hub")
    state, outputs, tied = _to_write(model)
    sizes = {o.name: torch.empty(o.value.shape, dtype=o.value.dtype, device="meta") for o in outputs}
    split = hub.split_state_dict_into_shards_factory(
        sizes, get_storage_size=nbytes, filename_pattern=PATTERN, max_shard_size=max_shard_size
    )
    notes = {"format": "pt", **tied, **(metadata or {})}
    folder = Path(folder)
    files = {
        name: SafetensorsFile(folder / name, {m: sizes[m] for m in members}, notes)
        for name, members in split.filename_to_tensors.items()
    }
    file_of = {member: files[name] for name, members in split.filename_to_tensors.items() for member in members}
    in_files = sorted(outputs, key=lambda o: list(files.values()).index(file_of[o.name]))  # few files open at once
    writing = Attempts()
    writing.attempt(_begin, folder)
    try:
        for output in _gathered(state, in_files):
            writing.attempt(_write, file_of[output.name], output)
        for file in files.values():
            writing.attempt(file.close)
        writing.attempt(_put_in_place, folder, split, tied)
    finally:
        _clean_up(folder, files.values())
    raise_everywhere(writing.error, folder)


class Attempts:
    """What rank 0 does. After an error it does nothing more, but goes on receiving, as the others go on sending."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, action: Callable[..., Any], *args: Any) -> Any:
        if rank() != 0 or self.error is not None:
            return None
        try:
            return action(*args)
        except Exception as error:
            self.error = error


def _to_write(model: nn.Module) -> tuple[dict[str, Any], list[FileTensor], dict[str, str]]:
    """The state dict; what is written of it; and the names in the files of tied tensors that are not written, with the
    names of those that stand for them."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = {canonical(name): value for name, value in model.state_dict().items() if name not in ignored}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; safetensors files hold tensors only")
    first = _stored_under(model, state)
    outputs = file_tensors(model, state)
    kept = [o for o in outputs if not any(p.name in first for p in o.parameters)]
    stands_for = {o.value.name: o.name for o in kept if isinstance(o.value, GatheredValue)}
    tied = {
        o.name: stands_for[first[o.value.name]]
        for o in outputs
        if isinstance(o.value, GatheredValue) and o.value.name in first
    }
    return state, kept, tied


def _stored_under(model: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """For each name of a tied tensor that is not written the one that is: the first, unless the model says which."""
    follow = getattr(model, "all_tied_weights_keys", None) or ()
    found = {}
    for group in ties(model):
        names = sorted((name for name in group if name in state), key=lambda name: name in follow)
        found.update(dict.fromkeys(names[1:], names[0]))
    return found


def _gathered(state: Mapping[str, Any], outputs: Iterable[FileTensor]) -> Iterator[FileTensor]:
    """Each output when rank 0 has what it is made of, and no more of the module than that. All ranks go through it."""
    outputs = list(outputs)
    turn = {name: n for n, name in enumerate(dict.fromkeys(p.name for o in outputs for p in o.parameters))}
    outputs.sort(key=lambda o: max((turn[p.name] for p in o.parameters), default=-1))
    last = {p.name: n for n, o in enumerate(outputs) for p in o.parameters}
    held: dict[str, GatheredValue] = {}
    for n, output in enumerate(outputs):
        for parameter in output.parameters:
            if parameter.name not in held:
                ((_, parameter.gathered),) = full_tensors({parameter.name: state[parameter.name]})
                held[parameter.name] = parameter
        yield output
        for parameter in output.parameters:
            if last[parameter.name] == n:
                held.pop(parameter.name).gathered = None


def _write(file: SafetensorsFile, output: FileTensor) -> None:
    file.write(output.name, output.value.whole())


def _begin(folder: Path) -> None:
    """Finish, or remove, what an earlier save left that died."""
    finish_replacing(folder)
    discard_unfinished(folder)


def _put_in_place(folder: Path, split: Any, tied: Mapping[str, str]) -> None:
    """Write the index of several files and let them replace an older export."""
    names = list(split.filename_to_tensors)
    if split.is_sharded:
        content = {"metadata": {**split.metadata, **tied}, "weight_map": split.tensor_to_filename}
        write_text(incomplete(folder / INDEX), json.dumps(content, indent=2, sort_keys=True) + "\n")
        names.append(INDEX)
    replace_export(folder, names)


def _clean_up(folder: Path, files: Iterable[SafetensorsFile]) -> None:
    """Leave nothing of a save that failed: a full disk must not stay full."""
    if rank() == 0:
        for file in files:
            file.abandon()
        with contextlib.suppress(OSError, CheckpointError):  # the error that is told is the one that made it fail
            discard_unfinished(folder)


def raise_everywhere(error: Exception | None, folder: Any) -> None:
    """Make rank 0's error one of every rank.

    Raises:
        CheckpointError: rank 0 has one.
    """
    text = None if error is None else f"cannot write to {folder}: {type(error).__name__}: {error}"
    if dist.is_available() and dist.is_initialized():
        box = [text]
        dist.broadcast_object_list(box, src=0)
        text = box[0]
    if text is not None:
        raise CheckpointError(text) from error
