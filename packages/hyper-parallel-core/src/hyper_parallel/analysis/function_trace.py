"""Which torch functions a program calls on the tensors that would be DTensors if the model were sharded.

Those are the parameters, the buffers, the inputs, and everything computed from them. A mask that a forward makes from
nothing (``torch.arange``, ``torch.full``) stays a plain tensor in a sharded run too, so it does not count until it
meets one of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hyper_parallel.comm.trace import user_line
from hyper_parallel.torch_compat import pytree

__all__ = ["FunctionTrace"]


class FunctionTrace(TorchFunctionMode):
    """Context manager that counts functions.

    Attributes:
        counts: function to number of calls.
        where: function to ``file:line`` of its first call.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.counts: dict[Callable[..., Any], int] = {}
        self.where: dict[Callable[..., Any], str] = {}
        self._followed = WeakIdKeyDictionary()
        for tensor in tensors:
            self._followed[tensor] = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        concerned = any(self._is_followed(leaf) for leaf in pytree.tree_leaves((args, kwargs)))
        if concerned:
            self.counts[func] = self.counts.get(func, 0) + 1
            if func not in self.where:
                self.where[func] = user_line()
        result = func(*args, **kwargs)
        if concerned:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._followed[leaf] = True
        return result

    def _is_followed(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf in self._followed
