"""What files store of a module, each tensor made of some of the module's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from hyper_parallel.checkpoint.deferred.tensor import deferred, value_of
from hyper_parallel.checkpoint.deferred.values import Bounds, DeferredValue
from hyper_parallel.checkpoint.stored_names import for_files

__all__ = ["FileTensor", "GatheredValue", "file_tensors"]


class GatheredValue(DeferredValue):
    """A tensor of the module's state dict, of which rank 0 has the whole while it is written."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.name = name
        self.gathered: torch.Tensor | None = None

    def make(self, bounds: Bounds) -> torch.Tensor:
        assert self.gathered is not None
        return self.gathered[tuple(slice(a, b) for a, b in bounds) or ...]


class FileTensor(NamedTuple):
    """A tensor of the files.

    Attributes:
        name: in the files.
        value: how it is made.
        parameters: the tensors of the module that it is made of.
    """

    name: str
    value: DeferredValue
    parameters: tuple[GatheredValue, ...]


def file_tensors(model: nn.Module, state: Mapping[str, torch.Tensor]) -> list[FileTensor]:
    """What files store of a module's state dict, in their order."""
    without_memory = {name: deferred(GatheredValue(name, tensor)) for name, tensor in state.items()}
    return [_file_tensor(name, value_of(tensor)) for name, tensor in for_files(model, without_memory).items()]


def _file_tensor(name: str, value: DeferredValue) -> FileTensor:
    seen, waiting = {value}, [value]
    while waiting:
        new = [part for part in waiting.pop().inputs() if part not in seen]
        seen.update(new)
        waiting += new
    found = sorted((part for part in seen if isinstance(part, GatheredValue)), key=lambda part: part.name)
    return FileTensor(name, value, tuple(found))
