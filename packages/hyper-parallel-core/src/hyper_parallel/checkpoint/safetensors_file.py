"""A safetensors file that is written tensor by tensor, in any order, so that none but one has to be in memory."""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch


class SafetensorsFile:
    """A file of an export, under a name that nobody reads; its tensors may come in any order.

    Args:
        path: its name in the end.
        tensors: of the shapes and dtypes that it gets.
        notes: its metadata.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
        self.path, self._tensors, self._notes = path, tensors, notes
        self._starts: dict[str, int] = {}
        self._stream: BinaryIO | None = None

    def _open(self) -> BinaryIO:
        header: dict[str, Any] = {"__metadata__": dict(self._notes)}
        end = 0
        # The order of the safetensors library, which keeps every tensor aligned.
        for name, tensor in sorted(self._tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            start, end = end, end + nbytes(tensor)
            header[name] = {"dtype": _kind(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stream = incomplete(self.path).open("wb")
        stream.write(len(text).to_bytes(8, "little") + text)
        self._starts = {n: 8 + len(text) + header[n]["data_offsets"][0] for n in self._tensors}
        return stream

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor in its place; the last one closes the file."""
        if self._stream is None:
            self._stream = self._open()
        self._stream.seek(self._starts.pop(name))
        _write(self._stream, tensor)
        if not self._starts:
            self.close()

    def close(self) -> None:
        """Have it on disk."""
        if self._stream is None:
            self._stream = self._open()
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def abandon(self) -> None:
        """Write no more."""
        if self._stream is not None:
            self._stream.close()


@functools.cache
def _kind(dtype: torch.dtype) -> str:
    """What safetensors calls a dtype, in its own words."""
    library("safetensors")
    from safetensors.torch import save

    data = save({"x": torch.empty(0, dtype=dtype)})
    return str(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"])


def _write(stream: BinaryIO, tensor: torch.Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel():
        stream.write((ctypes.c_char * nbytes(tensor)).from_address(tensor.data_ptr()))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def incomplete(path: Path) -> Path:
    return path.with_name(f".{path.name}.incomplete")


def library(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ImportError(
            f"safetensors files need {name}: pip install 'hyper-parallel-core[safetensors]'", name=name
        ) from error
