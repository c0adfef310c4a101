"""The tensors of safetensors files, of which any block is read by itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.checkpoint.deferred.tensor import DeferredTensor, deferred
from hyper_parallel.checkpoint.deferred.values import Bounds, DeferredValue
from hyper_parallel.checkpoint.replaced_export import INDEX, WHOLE, newest_files
from hyper_parallel.checkpoint.safetensors_file import library
from hyper_parallel.checkpoint.untrusted import leads_out
from hyper_parallel.errors import CheckpointError

__all__ = ["StoredValue", "stored_dtype", "stored_tensors"]

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


class StoredValue(DeferredValue):
    """A tensor in an open file."""

    def __init__(self, file: Any, name: str) -> None:
        part = file.get_slice(name)
        super().__init__(part.get_shape(), _DTYPES[part.get_dtype()])
        self._file, self._name = file, name

    def make(self, bounds: Bounds) -> torch.Tensor:
        part: Any = self._file.get_slice(self._name)
        read: torch.Tensor = part[tuple(slice(a, b) for a, b in bounds) or ...]
        return read


@contextlib.contextmanager
def stored_tensors(path: Path) -> Iterator[dict[str, DeferredTensor]]:
    """The tensors of a folder or file by name, while the files are open. One that was tied where it was written is
    there under each of its names, if the files say so.

    Raises:
        CheckpointError: files are missing (it lists all), the index or a file is malformed, the index names a file
            outside of its folder.
    """
    safetensors = library("safetensors")
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(_opened(safetensors, file)) for file in _files(path)]
        found = {name: deferred(_stored(file, name, path)) for file in files for name in file.keys()}
        for file in files:
            for name, kept in (file.metadata() or {}).items():
                if kept in found and name not in found:
                    found[name] = found[kept]
        yield found


def stored_dtype(path: Path | str) -> torch.dtype:
    """The kind of numbers in safetensors files: that of the first tensor of floating point of 16 bits or more.

    Raises:
        CheckpointError: as :func:`stored_tensors`.
    """
    with stored_tensors(Path(path)) as found:
        dtypes = (tensor.dtype for tensor in found.values())
        return next((d for d in dtypes if d.is_floating_point and d.itemsize > 1), torch.get_default_dtype())


def _stored(file: Any, name: str, path: Path) -> StoredValue:
    try:
        return StoredValue(file, name)
    except KeyError as error:
        raise CheckpointError(f"{path}: {name} is of a kind of numbers that is not known here: {error}") from error


def _files(path: Path) -> list[Path]:
    """The safetensors files that a path means."""
    newest = newest_files(path)
    if newest is not None:
        return newest
    if (path / WHOLE).is_file():  # other files beside it are in other formats, or adapters
        return [path / WHOLE]
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
