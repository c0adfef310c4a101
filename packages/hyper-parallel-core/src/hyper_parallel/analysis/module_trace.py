"""Which module's forward runs, by its name in the outermost one; and what memory a step takes on this rank."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hyper_parallel.sharding.shard_ranges import local_shape
from hyper_parallel.tensor.dtensor import DTensor

__all__ = ["ModuleTrace"]


class ModuleTrace:
    """Context manager that follows the calls of modules.

    Attributes:
        roots: the modules that were called by something that is no module, in order.
        saved: bytes of the local tensors that were kept for backward, parameters left out, each memory once.
    """

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self.saved = 0
        self._running: list[nn.Module] = []
        self._names: dict[nn.Module, str] = {}
        self._memories: set[int] = set()

    def __enter__(self) -> ModuleTrace:
        self._handles = [
            register_module_forward_pre_hook(lambda module, args: self._begin(module)),
            register_module_forward_hook(lambda module, args, output: self._end(module), always_call=True),
        ]
        self._hooks = ExitStack()
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._hooks.close()
        for handle in self._handles:
            handle.remove()

    @property
    def module(self) -> str:
        """The name of the module whose forward runs, the numbers in it as ``*``, so that layers that do the same have
        one name. Empty outside of modules, and in the outermost one."""
        if not self._running:
            return ""
        return re.sub(r"(?<=\.)\d+|^\d+", "*", self._names.get(self._running[-1], ""))

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: of the parameters of all modules that ran, their gradients, AdamW's two moments, and what
        was kept for backward."""
        parameters = {p: None for root in self.roots for p in root.parameters()}
        held = sum(map(_local_nbytes, parameters))
        trained = sum(_local_nbytes(p) for p in parameters if p.requires_grad)
        return {"parameters": held, "gradients": trained, "AdamW": 2 * trained, "activations": self.saved}

    def _begin(self, module: nn.Module) -> None:
        if not self._running and module not in self.roots:
            self.roots.append(module)
            self._names.update((inner, name) for name, inner in module.named_modules())
        self._running.append(module)

    def _end(self, module: nn.Module) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or (tensor.is_leaf and tensor.requires_grad):
            return tensor
        memory = tensor.untyped_storage()
        if memory._cdata not in self._memories:
            self._memories.add(memory._cdata)
            self.saved += memory.nbytes()
        return tensor


def _local_nbytes(tensor: Any) -> int:
    if not isinstance(tensor, DTensor):
        return int(tensor.nbytes)
    layout = tensor.layout
    count = math.prod(local_shape(layout, tuple(tensor.shape), layout.info.my_coordinate()))
    return count * tensor.element_size()
