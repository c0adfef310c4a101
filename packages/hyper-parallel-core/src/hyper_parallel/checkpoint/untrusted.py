"""Checkpoints that somebody else has made: file names that stay inside of the folder, and a table of contents that is
read without running what is written in it."""

from __future__ import annotations

import collections
import pathlib
import pickle
from pathlib import PureWindowsPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata

from hyper_parallel import torch_compat

__all__ = ["UnsafeCheckpointError", "check_names", "leads_out", "plain_metadata"]


class UnsafeCheckpointError(ValueError):
    """A checkpoint that would read other files than its own, or run code."""


def leads_out(name: str) -> bool:
    """Whether a file name that a checkpoint gives means a file outside of its folder, on any system.

    A link inside of the folder is followed: the folders of Hugging Face's cache consist of them.
    """
    path = PureWindowsPath(name)  # knows both separators, and drives
    return bool(path.anchor) or ".." in path.parts or not path.parts


def check_names(table: metadata.Metadata, folder: pathlib.Path) -> None:
    """Refuse a table of contents that names files outside of its folder.

    Raises:
        UnsafeCheckpointError: it does.
    """
    names = {str(stored.relative_path) for stored in (table.storage_data or {}).values()}
    outside = sorted(filter(leads_out, names))
    if outside:
        raise UnsafeCheckpointError(
            f"the .metadata of {folder} names files outside of the folder, which are not read: {', '.join(outside[:5])}"
        )


def plain_metadata(file: BinaryIO) -> metadata.Metadata:
    """The table of contents of a checkpoint, without running code.

    Raises:
        UnsafeCheckpointError: the file refers to other things than a table of contents is made of.
    """
    found = _MetadataUnpickler(file).load()
    if not isinstance(found, metadata.Metadata):
        raise UnsafeCheckpointError(f".metadata holds a {type(found).__name__}, no table of contents")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of a table of contents and nothing else: making one of them has no effects."""

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get(name) if module.split(".")[0] in _HOMES else None
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise UnsafeCheckpointError(
                f".metadata refers to {module}.{name}, which weights_only=True does not load; load it with "
                "weights_only=False if you trust whoever made it"
            )
        return found


_CLASSES: tuple[Any, ...] = (
    *(getattr(metadata, name) for name in metadata.__all__),
    *torch_compat.checkpoint_classes(),
    torch.Size,
    torch_compat.get_memory_layout,
    collections.OrderedDict,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
)
_KNOWN: dict[str, Any] = {known.__name__: known for known in _CLASSES}
_HOMES = ("torch", "collections", "pathlib")
