"""One forward of a wrapped module, and the hooks that tell when its backward begins and ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from hyper_parallel.rules import gradient_paths, torch_compat

if TYPE_CHECKING:
    from hyper_parallel_fsdp.state import FullyShardState


class ForwardRecord:
    """One forward of a wrapped module, whose backward is to come: open from when it begins to when it ends.

    Args:
        state: of the module.
        outer: that of the wrapped module in whose forward it runs, or None.
        given: what the module was called with, until the forward is over.
    """

    __slots__ = ("_begin", "_task", "given", "handle", "opened", "outer", "state", "watched")

    def __init__(self, state: FullyShardState, outer: ForwardRecord | None, given: Any) -> None:
        self.state, self.opened, self.watched = state, False, False
        self.handle: Any = None
        self.given = given
        self.outer = outer
        self._task = -1  # the backward that opened it last
        self._begin = 0  # number of the first node that the forward itself makes

    def watch_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        """The backward is over when the inputs have their gradients."""
        tensors = [path for t in inputs if t.requires_grad for path in gradient_paths(t)[-1:] if path.requires_grad]
        for tensor in tensors:
            tensor.grad_fn  # noqa: B018 - made anew after writes to views; PyTorch's register_hook crashes without
        self._begin = torch_compat.sequence_number()
        if not tensors:
            return  # the end of the whole backward closes it
        self.watched = True
        if len(tensors) == 1:
            handle: Any = tensors[0].register_hook(self._close)
            # Before what the module below does with the same gradient: free and reduce, then gather. (Put in anew, as
            # the engine does not see move_to_end.)
            hooks: Any = tensors[0]._backward_hooks
            for key in [k for k in hooks if k != handle.id]:
                hooks[key] = hooks.pop(key)
        else:
            handle = register_multi_grad_hook(tensors, self._close)
        if any(t.is_leaf for t in tensors):  # else the hook goes with the graph
            self.handle = handle

    def watch_outputs(self, outputs: Iterable[torch.Tensor]) -> None:
        """The backward begins when an output, or what else the forward left, has its gradient."""
        watched: set[int] = set()
        for tensor in outputs:
            if tensor.requires_grad and id(tensor) not in watched:
                watched.add(id(tensor))
                for path in gradient_paths(tensor):
                    self._watch(path)

    def _watch(self, path: torch.Tensor) -> None:
        if self._is_new(path):
            path.register_hook(self._open)
        if path._is_view() and self._is_new(path._base):
            # After a write to the view, which gives it another node, the gradient comes to the base alone.
            path._base.register_hook(self._open_once)  # type: ignore[union-attr]

    def _is_new(self, tensor: torch.Tensor | None) -> bool:
        """Whether this forward computed it: what is older gets its gradient when this backward is over."""
        node: Any = None if tensor is None else tensor.grad_fn
        return node is not None and node._sequence_nr() >= self._begin

    def _open_once(self, grad: Any) -> None:
        if self._task != torch_compat.current_task():
            self._open(grad)

    def _open(self, grad: Any) -> None:
        self._task = torch_compat.current_task()
        outer = self.outer
        if outer is not None and outer._task != self._task and not outer.state.runs_backward:
            outer._open(grad)  # the gradient did not come by way of its output
        self.state.backward_begins(None if self.opened else self)
        self.opened = True

    def _close(self, grad: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.state.backward_ends(self)
