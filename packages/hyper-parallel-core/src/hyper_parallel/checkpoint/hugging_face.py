"""Models as Hugging Face safetensors files: ``model.safetensors``, or shards of a largest size and their index.

The names are those of the module's state dict; for a model of ``transformers`` those of its ``save_pretrained``
(:mod:`~hyper_parallel.checkpoint.stored_names`). Needs ``safetensors`` and ``huggingface_hub`` (the extra
``safetensors`` of this package).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.checkpoint.block_scales import block_size_of, with_scales_applied
from hyper_parallel.checkpoint.deferred.tensor import deferred, value_of
from hyper_parallel.checkpoint.deferred.values import Bounds, DeferredValue
from hyper_parallel.checkpoint.given_values import fill
from hyper_parallel.checkpoint.model_state import canonical, ties
from hyper_parallel.checkpoint.replaced_export import (
    INDEX,
    discard_unfinished,
    finish_replacing,
    replace_export,
    write_text,
)
from hyper_parallel.checkpoint.safetensors_file import SafetensorsFile, incomplete, library, nbytes
from hyper_parallel.checkpoint.stored_names import FromFiles, for_files, from_files
from hyper_parallel.checkpoint.stored_tensors import stored_tensors
from hyper_parallel.checkpoint.whole_tensors import full_tensors, rank
from hyper_parallel.errors import CheckpointError

__all__ = ["Attempts", "load_safetensors", "raise_everywhere", "save_safetensors"]

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


def load_safetensors(
    model: nn.Module, path: str | Path, *, strict: bool = True, defaults: Mapping[str, torch.Tensor] | None = None
) -> tuple[list[str], list[str]]:
    """Read safetensors files into a module, in place. Each rank reads the slices that it holds; nothing is sent, and no
    code is run: the files hold numbers only.

    The files of a model of ``transformers`` are read as its ``from_pretrained`` reads them: under the names that they
    have on the hub, without what the model says it ignores. Weights of 8 or 4 bits that have a scale for each block
    (float8 with ``weight_scale_inv``, MXFP4) are read as the numbers that they stand for.

    Args:
        model: any module, not on the meta device. Values are converted to its dtypes.
        path: a folder with ``model.safetensors.index.json`` or with ``*.safetensors`` files, or one file. All ranks
            must see the same.
        strict: whether names that the files lack, or have beside the module's, are an error. One name of a tied tensor
            is enough; that it was tied where it was written is in the files.
        defaults: by name the values of what files need not have, of :func:`build_on_meta`: buffers that are not stored,
            and what a model of ``transformers`` says may be missing; not ``strict``, all that the files lack. None: it
            stays as it is.

    Returns:
        (missing names, unexpected names).

    Raises:
        CheckpointError: names are missing or unexpected (``strict``), shapes differ, numbers are in a form that is not
            known here, files are missing (it lists all), the index or a file is malformed, the index names a file
            outside of its folder.
        RuntimeError: the module is on the meta device.
    """
    targets = {canonical(n): t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    on_meta = [name for name, tensor in targets.items() if tensor.is_meta]
    if on_meta:
        raise RuntimeError(f"{on_meta[0]} is on the meta device; give the model memory first: model.to_empty(device=…)")
    with stored_tensors(Path(path)) as files:
        stored = with_scales_applied(files, block_size_of(Path(path)))
        found = from_files(model, targets, stored)
        problems = [
            *_misfits(found, targets),
            *_unequal_ties(model, found),
            *(f"  {name}: {why}" for name, why in found.failed.items()),
        ]
        absent = _absent(model, targets, stored, problems)
        missing = _missing(model, targets, found)
        if strict or absent:
            unexpected = found.unexpected if strict else []
            problems = [
                *_named("missing in the files", [*(missing if strict else []), *absent]),
                *_named("only in the files", unexpected),
                *problems,
            ]
        if problems:
            hint = "\nstrict=False loads the names that both have" if missing or found.unexpected else ""
            raise CheckpointError(f"{path} does not fit the model:\n" + "\n".join(problems) + hint)
        with torch.no_grad():
            for name, value in found.values.items():
                fill(targets[name], value)
            if defaults is not None:
                _fill_others(model, found, defaults)
    return missing, found.unexpected


# -- writing ----------------------------------------------------------------------------------------------------------


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


class _GatheredValue(DeferredValue):
    """A tensor of the module's state dict, of which rank 0 has the whole while it is written."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.name = name
        self.gathered: torch.Tensor | None = None

    def make(self, bounds: Bounds) -> torch.Tensor:
        assert self.gathered is not None
        return self.gathered[tuple(slice(a, b) for a, b in bounds) or ...]


class _FileTensor(NamedTuple):
    """A tensor of the files."""

    name: str
    value: DeferredValue
    parameters: tuple[_GatheredValue, ...]  # that it is made of


def _to_write(model: nn.Module) -> tuple[dict[str, Any], list[_FileTensor], dict[str, str]]:
    """The state dict; what is written of it; and the names in the files of tied tensors that are not written, with the
    names of those that stand for them."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = {canonical(name): value for name, value in model.state_dict().items() if name not in ignored}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; safetensors files hold tensors only")
    first = _stored_under(model, state)
    without_memory = {name: deferred(_GatheredValue(name, tensor)) for name, tensor in state.items()}
    outputs = [_output(name, tensor) for name, tensor in for_files(model, without_memory).items()]
    kept = [o for o in outputs if not any(p.name in first for p in o.parameters)]
    stands_for = {o.value.name: o.name for o in kept if isinstance(o.value, _GatheredValue)}
    tied = {
        o.name: stands_for[first[o.value.name]]
        for o in outputs
        if isinstance(o.value, _GatheredValue) and o.value.name in first
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


def _output(name: str, tensor: torch.Tensor) -> _FileTensor:
    value = value_of(tensor)
    parameters, waiting = {}, [value]
    while waiting:
        made_of = waiting.pop()
        if isinstance(made_of, _GatheredValue):
            parameters[made_of.name] = made_of
        waiting += made_of.inputs()
    return _FileTensor(name, value, tuple(parameters.values()))


def _gathered(state: Mapping[str, Any], outputs: Iterable[_FileTensor]) -> Iterator[_FileTensor]:
    """Each output when rank 0 has what it is made of, and no more of the module than that. All ranks go through it."""
    outputs = list(outputs)
    turn = {name: n for n, name in enumerate(dict.fromkeys(p.name for o in outputs for p in o.parameters))}
    outputs.sort(key=lambda o: max((turn[p.name] for p in o.parameters), default=-1))
    last = {p.name: n for n, o in enumerate(outputs) for p in o.parameters}
    held: dict[str, _GatheredValue] = {}
    for n, output in enumerate(outputs):
        for parameter in output.parameters:
            if parameter.name not in held:
                ((_, parameter.gathered),) = full_tensors({parameter.name: state[parameter.name]})
                held[parameter.name] = parameter
        yield output
        for parameter in output.parameters:
            if last[parameter.name] == n:
                held.pop(parameter.name).gathered = None


def _write(file: SafetensorsFile, output: _FileTensor) -> None:
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


# -- reading ----------------------------------------------------------------------------------------------------------


def _misfits(found: FromFiles, targets: Mapping[str, torch.Tensor]) -> list[str]:
    """What the files have in another shape, or in numbers that need a conversion that is not known."""
    problems = []
    for name, value in found.values.items():
        target = targets[name]
        if tuple(value.shape) != tuple(target.shape):
            problems.append(f"  {name} has shape {tuple(value.shape)} in the file, {tuple(target.shape)} in the model")
        elif target.is_floating_point() and (not value.is_floating_point() or value.dtype.itemsize == 1):
            if value.dtype != target.dtype:
                problems.append(
                    f"  {name} is {value.dtype} in the file without scales that are known here, {target.dtype} in the "
                    "model; store it as numbers of 16 or 32 bits"
                )
    return problems


def _unequal_ties(model: nn.Module, found: FromFiles) -> list[str]:
    """Tensors that are one in the model, and of which the files have several with different numbers."""
    problems = []
    for group in ties(model):
        first, *others = [name for name in group if name in found.values] or [""]
        for name in others:
            one, other = value_of(found.values[first]), value_of(found.values[name])
            if one is not other and one.shape == other.shape and not _equal(one, other):
                problems.append(
                    f"  {name} is tied to {first} in the model and has other numbers in the file; build the model with "
                    "tie_word_embeddings=False in its configuration"
                )
    return problems


def _equal(one: DeferredValue, other: DeferredValue) -> bool:
    """Compare a few rows at a time."""
    rows = [(n, min(n + 4096, one.shape[0])) for n in range(0, one.shape[0], 4096)] if one.shape else []
    blocks: list[Bounds] = [(part, *((0, n) for n in one.shape[1:])) for part in rows] or [()]
    return all(torch.equal(one.block(bounds), other.block(bounds)) for bounds in blocks)


def _missing(model: nn.Module, targets: Mapping[str, torch.Tensor], found: FromFiles) -> list[str]:
    """The names that the files lack, without second names of what they have and those that they may lack."""
    lacking = [name for name in targets if name not in found.values and name not in found.failed]
    satisfied = {name for group in ties(model) if found.values.keys() & set(group) for name in group}
    return [n for n in lacking if n not in satisfied and not (found.may_lack and found.may_lack.search(n))]


def _absent(
    model: nn.Module, targets: Mapping[str, torch.Tensor], stored: Mapping[str, Any], problems: list[str]
) -> list[str]:
    """Names in the files without which parameters cannot be put together; their problems are explained by that."""
    absent = []
    if problems:
        without_memory = {name: deferred(_GatheredValue(name, tensor)) for name, tensor in targets.items()}
        for name, tensor in for_files(model, without_memory).items():
            of = [p.name for p in _output(name, tensor).parameters]
            explained = [p for p in problems if any(p.startswith((f"  {n} ", f"  {n}:")) for n in of)]
            if name not in stored and name not in targets and explained:
                absent.append(name)
                problems[:] = [problem for problem in problems if problem not in explained]
    return absent


def _fill_others(model: nn.Module, found: FromFiles, defaults: Mapping[str, torch.Tensor]) -> None:
    """Give values to what the files have not.

    Raises:
        CheckpointError: there are none for it.
    """
    filled = {name for group in ties(model) if found.values.keys() & set(group) for name in group} | set(found.values)
    tensors = {canonical(name): tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    others = [name for name in tensors if name not in filled]
    unknown = [name for name in others if name not in defaults]
    if unknown:
        raise CheckpointError(
            f"no values for {', '.join(unknown[:5])}: the files have none, and nobody knows how they are made"
        )
    for name in others:
        fill(tensors[name], defaults[name])


def _named(title: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    return [f"  {title}: {', '.join(found)}"] if found else []
