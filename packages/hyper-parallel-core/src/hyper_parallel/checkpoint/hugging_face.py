"""Models as Hugging Face safetensors files: ``model.safetensors``, or shards of a largest size and their index.

The names are those of the module's state dict; for a model of ``transformers`` those of its ``save_pretrained``
(:mod:`~hyper_parallel.checkpoint.stored_names`). Needs ``safetensors`` and ``huggingface_hub`` (the extra
``safetensors`` of this package).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.checkpoint.model_state import canonical, second_names, ties
from hyper_parallel.checkpoint.safetensors_file import SafetensorsFile, incomplete, library, nbytes
from hyper_parallel.checkpoint.stored_names import Piece, pieces_of, whole_piece
from hyper_parallel.checkpoint.whole_tensors import full_tensors, rank
from hyper_parallel.errors import CheckpointError
from hyper_parallel.tensor.dcp_protocol import blocks
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import before_write

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
    hub = library("huggingface_hub")
    state, pieces, tied = _to_write(model)
    sizes = {p.name: torch.empty(p.shape, dtype=state[p.source].dtype, device="meta") for p in pieces}
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
    by_source: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda p: list(files.values()).index(file_of[p.name])):  # few files open at once
        by_source.setdefault(piece.source, []).append(piece)
    writing = _Attempts()
    for source, whole in full_tensors({source: state[source] for source in by_source}):
        for piece in by_source[source]:
            writing.attempt(_write_piece, file_of[piece.name], piece, whole)
    for file in files.values():
        writing.attempt(file.close)
    writing.attempt(_put_in_place, folder, split, tied)
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
    safetensors = library("safetensors")
    targets = {canonical(n): t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    on_meta = [name for name, tensor in targets.items() if tensor.is_meta]
    if on_meta:
        raise RuntimeError(f"{on_meta[0]} is on the meta device; give the model memory first: model.to_empty(device=…)")
    with contextlib.ExitStack() as opened:
        stored = _stored(Path(path), lambda file: opened.enter_context(safetensors.safe_open(file, framework="pt")))
        reads, lacking = _to_read(model, targets, stored)
        complete = targets.keys() - lacking.keys()
        satisfied = {name for group in ties(model) if complete & set(group) for name in group}
        missing = [name for name in lacking if name not in satisfied]
        used = {piece.name for piece in reads}
        unexpected = [name for name, entry in stored.items() if name not in used and entry.name == name]
        problems = []
        if strict:
            absent = (name for target in missing for name in lacking[target])
            problems = [*_named("missing in the files", absent), *_named("only in the files", unexpected)]
        slices = [(piece, stored[piece.name].get_slice()) for piece in reads]
        for piece, part in slices:
            if tuple(part.get_shape()) != piece.shape:
                problems.append(
                    f"  {piece.name} has shape {tuple(part.get_shape())} in the file, {piece.shape} in the model"
                )
        if problems:
            hint = "\nstrict=False loads the names that both have" if missing or unexpected else ""
            raise CheckpointError(f"{path} does not fit the model:\n" + "\n".join(problems) + hint)
        with torch.no_grad():
            for piece, part in slices:
                _read(part, piece, targets[piece.source])
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


def _to_write(model: nn.Module) -> tuple[dict[str, Any], list[Piece], dict[str, str]]:
    """The state dict; what is written of it; and the names in the files of tied tensors that are not written, with the
    names of those that stand for them."""
    state = {canonical(name): value for name, value in model.state_dict().items()}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; safetensors files hold tensors only")
    first = second_names(model, state)
    pieces = pieces_of(model, state)
    written = {(p.source, p.box): p.name for p in pieces}
    tied = {p.name: written[first[p.source], p.box] for p in pieces if p.source in first}
    return state, [p for p in pieces if p.source not in first], tied


def _write_piece(file: SafetensorsFile, piece: Piece, whole: torch.Tensor) -> None:
    file.write(piece.name, piece.of(whole))


def _put_in_place(folder: Path, split: Any, tied: Mapping[str, str]) -> None:
    """Rename the files, remove those of an older export, and write the index of several."""
    index = incomplete(folder / INDEX)
    if split.is_sharded:
        content = {"metadata": {**split.metadata, **tied}, "weight_map": split.tensor_to_filename}
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    for name in split.filename_to_tensors:
        incomplete(folder / name).rename(folder / name)
    if split.is_sharded:
        index.rename(folder / INDEX)
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in {folder / "model.safetensors", *folder.glob("model-?????-of-?????.safetensors")}:
        if old.name not in split.filename_to_tensors:
            old.unlink(missing_ok=True)


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


def _to_read(
    model: nn.Module, targets: Mapping[str, torch.Tensor], stored: Mapping[str, _Stored]
) -> tuple[list[Piece], dict[str, list[str]]]:
    """The pieces that the files have, and per tensor that they do not have whole the names that they lack."""
    by_source: dict[str, list[Piece]] = {}
    for piece in pieces_of(model, targets):
        by_source.setdefault(piece.source, []).append(piece)
    reads: list[Piece] = []
    lacking: dict[str, list[str]] = {}
    for name, target in targets.items():
        pieces = [whole_piece(name, target)] if name in stored else by_source[name]
        absent = [piece.name for piece in pieces if piece.name not in stored]
        if absent:
            lacking[name] = [name] if len(absent) == len(pieces) else absent
        reads += [piece for piece in pieces if piece.name in stored]
    return reads, lacking


def _read(part: Any, piece: Piece, target: torch.Tensor) -> None:
    """Copy from its file what this rank holds of a piece."""
    if not isinstance(target, DTensor):
        piece.read(part, (0,) * target.ndim, tuple(target.shape), target)
        return
    before_write(target)
    local = target._resolve()
    for offsets, sizes, place in blocks(target):
        if sizes.numel():
            piece.read(part, offsets, sizes, local[place])


def _named(title: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    return [f"  {title}: {', '.join(found)}"] if found else []
