"""What the wrapped modules of one model share: the order in which they run, the kind of batch, what is in flight."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel import DTensor
from hyper_parallel.rules import tensors_of, torch_compat
from hyper_parallel_fsdp.reduction import GradientReduction

if TYPE_CHECKING:
    from hyper_parallel_fsdp.forward_record import ForwardRecord
    from hyper_parallel_fsdp.state import FullyShardState

_roots: weakref.WeakSet[Root] = weakref.WeakSet()
_calls = itertools.count(1)
IN_FLIGHT = 2
"""Reductions in flight at once: one may be reduce-scattered while the one before is all-reduced."""


class Root:
    """Shared by a wrapped module and the wrapped modules in it.

    Attributes:
        states: all of them, the root first.
        laid_out: whether batches are DTensors over the data axes; None before the first forward. Parameters are handed
            out accordingly, and gradients summed instead of averaged.
        is_last_backward: whether the end of a backward waits for the reductions.
        call: number of the running call of the outermost wrapped module, or of the last one.
        trains: whether that call began with gradients on, so that a backward may follow.
    """

    def __init__(self, states: list[FullyShardState]) -> None:
        self.states = states
        self.laid_out: bool | None = None
        self.is_last_backward = True
        self.outermost: FullyShardState | None = None
        self.call, self.trains = 0, False
        self.innermost: ForwardRecord | None = None  # of the wrapped module that is computing
        self._in_backward = False
        self._reductions: deque[GradientReduction] = deque()
        # Of the running forward, and of the last one: states by when their forward began, and by when it ended.
        self._starts: list[FullyShardState] = []
        self._ends: list[FullyShardState] = []
        self._next: dict[FullyShardState, FullyShardState] = {}
        self._before: dict[FullyShardState, FullyShardState] = {}
        self.last: FullyShardState | None = None
        self.stream: Any = None
        device = states[0].device
        if device.type not in ("cpu", "meta"):
            self.stream = torch.get_device_module(device).Stream()
        _roots.add(self)

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin_forward(self, state: FullyShardState, args: Any, kwargs: Any) -> None:
        """The outermost wrapped module begins."""
        if self._in_backward:
            self.reset()  # an exception ended the backward before its end
        elif self.outermost is state:
            self.reset()  # or the forward
        self._fix_kind(state, args, kwargs)
        self.outermost = state
        self.call, self.trains = next(_calls), torch.is_grad_enabled()
        self._starts, self._ends, self.innermost = [], [], None

    def began(self, state: FullyShardState) -> None:
        """A wrapped module begins: note it."""
        self._starts.append(state)

    def ended(self, state: FullyShardState, completed: bool) -> None:
        """A wrapped module ended, by an exception or not."""
        self._ends.append(state)
        if state is not self.outermost:
            return
        self.outermost = None
        if completed:
            self._next = dict(zip(self._starts, self._starts[1:], strict=False))
            self._before = dict(zip(self._ends[1:], self._ends, strict=False))
            self.last = self._before.get(state)
        for other in self.states:
            other.end_forward()

    def next_forward(self, state: FullyShardState) -> Iterable[FullyShardState]:
        """What ran after it in the last forward."""
        return (self._next[state],) if state in self._next else ()

    def next_backward(self, state: FullyShardState) -> Iterable[FullyShardState]:
        """Whose backward comes after its own."""
        return (self._before[state],) if state in self._before else ()

    # -- the kind of batch ------------------------------------------------------------------------------------------

    def _fix_kind(self, state: FullyShardState, args: Any, kwargs: Any) -> None:
        data_axes = {n for s in self.states for n in s.data.axis_names(s.data.roles.data)}
        kinds: dict[bool, torch.Tensor] = {}
        for tensor in tensors_of((args, kwargs)):
            laid_out = isinstance(tensor, DTensor) and bool(data_axes & set(tensor.layout.mesh_dim_names))
            if laid_out or tensor.ndim:  # a plain number is the same on all ranks
                kinds.setdefault(laid_out, tensor)
        if not kinds:
            self.laid_out = bool(self.laid_out)
            return
        if len(kinds) == 2:
            raise ValueError(
                f"{state.modules[0].__class__.__name__}: a DTensor over the data axes {sorted(data_axes)} "
                f"({kinds[True].layout}) and a {_kind(kinds[False])} of shape {tuple(kinds[False].shape)} in one call. "
                "Pass all of the batch as DTensors (DTensor.from_local(x, mesh, placements) for this rank's part, "
                "distribute_tensor for a whole tensor), or all of it plain"
            )
        (laid_out,) = kinds
        if self.laid_out is None:
            self.laid_out = laid_out
        elif self.laid_out is not laid_out:
            first, now = ("DTensors over the data axes", "plain tensors")[:: 1 if self.laid_out else -1]
            raise ValueError(
                f"{state.modules[0].__class__.__name__}: the first batch came as {first}, this one as {now}. How the "
                "parameters are handed out and their gradients reduced is fixed by the first; pass the same kind"
            )

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Some wrapped module's backward begins; the first one asks the engine to be told of the end."""
        if not self._in_backward:
            self._in_backward = True
            torch_compat.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        ordered = dict.fromkeys((*reversed(self._ends), *self.states))
        for state in ordered:
            state.end_backward()
        if self.is_last_backward:
            self.wait_for_reductions()

    def make_room(self) -> None:
        """Go on with the reductions in flight, before another one packs its gradients."""
        if self.stream is None:
            self._reductions = deque(r for r in self._reductions if not r.step())
        while len(self._reductions) >= IN_FLIGHT:
            _finish(self._reductions.popleft())

    def add(self, reduction: GradientReduction) -> None:
        """Take over a reduction that has begun."""
        self._reductions.append(reduction)

    def wait_for_reductions(self) -> None:
        """Until every gradient is in its place."""
        while self._reductions:
            _finish(self._reductions.popleft())

    def reset(self) -> None:
        """Forget an iteration that an exception ended: its gradients are lost, all parameters are sharded again."""
        self.outermost, self._in_backward = None, False
        while self._reductions:
            self._reductions.popleft().abandon()
        for state in self.states:
            state.reset()


def _finish(reduction: GradientReduction) -> None:
    while not reduction.step():
        pass


def wait_for_all_reductions() -> None:
    """Until the gradients of every wrapped model are in their places."""
    for root in tuple(_roots):
        root.wait_for_reductions()


def _kind(tensor: torch.Tensor) -> str:
    return "DTensor without data axes" if isinstance(tensor, DTensor) else "plain tensor"
