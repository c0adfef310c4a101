"""Read Hugging Face safetensors files into a module: ``model.safetensors``, or several files and their index.

The names are those of the module's state dict; for a model of ``transformers`` those that its ``from_pretrained`` reads
(:mod:`~hyper_parallel.checkpoint.stored_names`). Needs ``safetensors`` (the extra ``safetensors`` of this package).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.checkpoint.block_scales import block_size_of, with_scales_applied
from hyper_parallel.checkpoint.deferred.tensor import value_of
from hyper_parallel.checkpoint.deferred.values import Bounds, DeferredValue
from hyper_parallel.checkpoint.file_tensors import file_tensors
from hyper_parallel.checkpoint.given_values import fill
from hyper_parallel.checkpoint.model_state import canonical, ties
from hyper_parallel.checkpoint.stored_names import FromFiles, from_files
from hyper_parallel.checkpoint.stored_tensors import stored_tensors
from hyper_parallel.errors import CheckpointError

__all__ = ["load_safetensors"]


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
    absent: list[str] = []
    explained: set[str] = set()
    for name, _, parameters in file_tensors(model, targets) if problems else ():
        if name not in stored and name not in targets:
            starts = tuple(f"  {parameter.name}{end}" for parameter in parameters for end in (" ", ":"))
            found = [problem for problem in problems if problem.startswith(starts)]
            explained.update(found)
            absent += [name] if found else []
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
