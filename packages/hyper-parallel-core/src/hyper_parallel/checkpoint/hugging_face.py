"""Models as Hugging Face safetensors files: ``model.safetensors``, or shards of a largest size and their index.

The names are those of the module's state dict, which for a model of ``transformers`` are the ones that
``from_pretrained`` reads. Needs ``safetensors`` and ``huggingface_hub`` (the extra ``safetensors`` of this package).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.checkpoint.blocks import blocks
from hyper_parallel.checkpoint.model_state import canonical, second_names, ties
from hyper_parallel.checkpoint.whole_tensors import full_tensors, rank
from hyper_parallel.dtensor import DTensor
from hyper_parallel.errors import CheckpointError
from hyper_parallel.in_place import before_write

__all__ = ["load_safetensors", "save_safetensors"]

INDEX = "model.safetensors.index.json"
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
    under their first name. Files of an older export are replaced when all new ones are written.

    Args:
        model: any module; what is sharded in it is a DTensor.
        folder: made when it is missing; other files in it stay.
        max_shard_size: bytes, or ``"200MB"``, ``"5GB"`` (powers of ten). A larger tensor has a file of its own.
        metadata: goes into each file beside ``{"format": "pt"}``.

    Raises:
        CheckpointError: on every rank, when rank 0 could not write.
        TypeError: the state dict has an entry that is no tensor.
    """
    hub = _library("huggingface_hub")
    tensors, dropped = _tensors_to_write(model)
    split = hub.split_state_dict_into_shards_factory(
        tensors, get_storage_size=_nbytes, filename_pattern=PATTERN, max_shard_size=max_shard_size
    )
    notes = {"format": "pt", **dropped, **(metadata or {})}
    folder = Path(folder)
    writing = _Attempts()
    for name, members in split.filename_to_tensors.items():
        # The order of the safetensors library, which keeps every tensor aligned.
        chosen = {member: tensors[member] for member in sorted(members, key=lambda m: (-tensors[m].dtype.itemsize, m))}
        stream = writing.attempt(_open, folder, name, chosen, notes)
        for _, tensor in full_tensors(chosen):
            writing.attempt(_write, stream, tensor)
        writing.attempt(_close, stream)
    writing.attempt(_put_in_place, folder, split, dropped)
    _raise_everywhere(writing.error, folder)


def load_safetensors(model: nn.Module, path: str | Path, *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Read safetensors files into a module, in place. Each rank reads the slices that it holds; nothing is sent.

    Args:
        model: any module, not on the meta device. Values are converted to its dtypes.
        path: a folder with ``model.safetensors.index.json`` or with ``*.safetensors`` files, or one file. All ranks
            must see the same.
        strict: whether names that the files lack, or have beside the module's, are an error. One name of a tied tensor
            is enough; that it was tied where it was written is in the files.

    Returns:
        (missing names, unexpected names).

    Raises:
        CheckpointError: names are missing or unexpected (``strict``), shapes differ, files are missing; it lists all.
        RuntimeError: the module is on the meta device.
    """
    safetensors = _library("safetensors")
    targets = {canonical(n): t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    on_meta = [name for name, tensor in targets.items() if tensor.is_meta]
    if on_meta:
        raise RuntimeError(f"{on_meta[0]} is on the meta device; give the model memory first: model.to_empty(device=…)")
    with contextlib.ExitStack() as opened:
        stored = _stored(Path(path), lambda file: opened.enter_context(safetensors.safe_open(file, framework="pt")))
        slices = {name: stored[name].get_slice() for name in targets if name in stored}
        satisfied = {name for group in ties(model) if any(name in slices for name in group) for name in group}
        missing = [name for name in targets if name not in slices and name not in satisfied]
        unexpected = [name for name, entry in stored.items() if name not in targets and entry.name == name]
        problems = (
            [*_named("missing in the files", missing), *_named("only in the files", unexpected)] if strict else []
        )
        for name, part in slices.items():
            if tuple(part.get_shape()) != tuple(targets[name].shape):
                shape = tuple(targets[name].shape)
                problems.append(f"  {name} has shape {tuple(part.get_shape())} in the file, {shape} in the model")
        if problems:
            hint = "\nstrict=False loads the names that both have" if missing or unexpected else ""
            raise CheckpointError(f"{path} does not fit the model:\n" + "\n".join(problems) + hint)
        with torch.no_grad():
            for name, part in slices.items():
                _read(part, targets[name])
    return missing, unexpected


# -- writing ----------------------------------------------------------------------------------------------------------


class _Attempts:
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


def _tensors_to_write(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state dict without second names of tied tensors; and those names, with the ones that stand for them."""
    state = {canonical(name): value for name, value in model.state_dict().items()}
    dropped = second_names(model, state)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; safetensors files hold tensors only")
    return {name: value for name, value in state.items() if name not in dropped}, dropped


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _open(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> BinaryIO:
    """The file with its header written, under a name that nobody reads."""
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    end = 0
    for member, tensor in tensors.items():
        start, end = end, end + _nbytes(tensor)
        kind = _kind(tensor.dtype)
        header[member] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    stream = _incomplete(folder / name).open("wb")
    stream.write(len(text).to_bytes(8, "little") + text)
    return stream


@functools.cache
def _kind(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype, in its own words."""
    _library("safetensors")
    from safetensors.torch import save

    data = save({"x": torch.empty(0, dtype=dtype)})
    return str(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"])


def _write(stream: BinaryIO, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel():
        stream.write((ctypes.c_char * _nbytes(tensor)).from_address(tensor.data_ptr()))


def _close(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _put_in_place(folder: Path, split: Any, dropped: Mapping[str, str]) -> None:
    """Rename the files, remove those of an older export, and write the index of several."""
    index = _incomplete(folder / INDEX)
    if split.is_sharded:
        content = {"metadata": {**split.metadata, **dropped}, "weight_map": split.tensor_to_filename}
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    for name in split.filename_to_tensors:
        _incomplete(folder / name).rename(folder / name)
    if split.is_sharded:
        index.rename(folder / INDEX)
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in {folder / "model.safetensors", *folder.glob("model-?????-of-?????.safetensors")}:
        if old.name not in split.filename_to_tensors:
            old.unlink(missing_ok=True)


def _incomplete(path: Path) -> Path:
    return path.with_name(f".{path.name}.incomplete")


def _raise_everywhere(error: Exception | None, folder: Path) -> None:
    text = None if error is None else f"cannot write to {folder}: {type(error).__name__}: {error}"
    if dist.is_available() and dist.is_initialized():
        box = [text]
        dist.broadcast_object_list(box, src=0)
        text = box[0]
    if text is not None:
        raise CheckpointError(text) from error


# -- reading ----------------------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """A tensor in an open file, where it may have another name: that of the one it was tied to."""

    file: Any
    name: str

    def get_slice(self) -> Any:
        """What safetensors reads slices from."""
        return self.file.get_slice(self.name)


def _stored(path: Path, open_file: Callable[[Path], Any]) -> dict[str, _Stored]:
    """Every tensor of the files by name."""
    index = path / INDEX
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        paths = sorted({path / file for file in weight_map.values()})
        absent = [file.name for file in paths if not file.is_file()]
        if absent:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(absent)}")
    else:
        paths = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"no *.safetensors file in {path}")
    files = [open_file(file) for file in paths]
    found = {name: _Stored(file, name) for file in files for name in file.keys()}
    for file in files:
        for name, kept in (file.metadata() or {}).items():
            if kept in found and name not in found:
                found[name] = found[kept]
    return found


def _read(part: Any, target: torch.Tensor) -> None:
    """Copy what this rank holds of a tensor from its file."""
    if not isinstance(target, DTensor):
        target.copy_(part[...])
        return
    before_write(target)
    local = target._resolve()
    for offsets, sizes, place in blocks(target):
        if sizes.numel():
            inside = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            local[place].copy_(part[inside or ...])


def _named(title: str, names: list[str]) -> list[str]:
    return [f"  {title}: {', '.join(sorted(names))}"] if names else []


def _library(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ImportError(
            f"safetensors files need {name}: pip install 'hyper-parallel-core[safetensors]'", name=name
        ) from error
