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
from hyper_parallel.checkpoint.replaced_export import (
    INDEX,
    discard_unfinished,
    finish_replacing,
    newest_files,
    replace_export,
    write_text,
)
from hyper_parallel.checkpoint.safetensors_file import SafetensorsFile, incomplete, library, nbytes
from hyper_parallel.checkpoint.stored_names import Piece, pieces_of, whole_piece
from hyper_parallel.checkpoint.untrusted import leads_out
from hyper_parallel.checkpoint.whole_tensors import full_tensors, rank
from hyper_parallel.errors import CheckpointError
from hyper_parallel.tensor.dcp_protocol import blocks
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import before_write

__all__ = ["load_safetensors", "save_safetensors"]

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
    writing.attempt(_begin, folder)
    try:
        for source, whole in full_tensors({source: state[source] for source in by_source}):
            for piece in by_source[source]:
                writing.attempt(_write_piece, file_of[piece.name], piece, whole)
        for file in files.values():
            writing.attempt(file.close)
        writing.attempt(_put_in_place, folder, split, tied)
    finally:
        _clean_up(folder, files.values())
    _raise_everywhere(writing.error, folder)


def load_safetensors(model: nn.Module, path: str | Path, *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Read safetensors files into a module, in place. Each rank reads the slices that it holds; nothing is sent, and no
    code is run: the files hold numbers only.

    Args:
        model: any module, not on the meta device. Values are converted to its dtypes.
        path: a folder with ``model.safetensors.index.json`` or with ``*.safetensors`` files, or one file. All ranks
            must see the same.
        strict: whether names that the files lack, or have beside the module's, are an error. One name of a tied tensor
            is enough; that it was tied where it was written is in the files.

    Returns:
        (missing names, unexpected names).

    Raises:
        CheckpointError: names are missing or unexpected (``strict``), shapes differ, files are missing (it lists all),
            the index or a file is malformed, the index names a file outside of its folder.
        RuntimeError: the module is on the meta device.
    """
    safetensors = library("safetensors")
    targets = {canonical(n): t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    on_meta = [name for name, tensor in targets.items() if tensor.is_meta]
    if on_meta:
        raise RuntimeError(f"{on_meta[0]} is on the meta device; give the model memory first: model.to_empty(device=…)")
    with contextlib.ExitStack() as opened:
        stored = _stored(Path(path), lambda file: opened.enter_context(_opened(safetensors, file)))
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
    files = [open_file(file) for file in _files(path)]
    found = {name: _Stored(file, name) for file in files for name in file.keys()}
    for file in files:
        for name, kept in (file.metadata() or {}).items():
            if kept in found and name not in found:
                found[name] = found[kept]
    return found


def _files(path: Path) -> list[Path]:
    """The safetensors files that a path means."""
    newest = newest_files(path)
    if newest is not None:
        return newest
    index = path / INDEX
    if index.is_file():
        paths = [path / name for name in _names_in(index)]
        absent = [file.name for file in paths if not file.is_file()]
        if absent:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(absent)}")
        return paths
    paths = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"no *.safetensors file in {path}")
    return paths


def _names_in(index: Path) -> list[str]:
    """The files that an index names, each once."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not JSON: {error}; copy the folder again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' from names of tensors to names of files")
    names = sorted(set(weight_map.values()))
    outside = list(filter(leads_out, names))
    if outside:
        raise CheckpointError(
            f"{index} names files outside of its folder, which are not read: {', '.join(outside[:5])}"
        )
    return names


def _opened(safetensors: Any, file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} is no safetensors file, or cut off: {error}; copy it again") from error


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
