"""Record every collective: what moved, how much, over which ranks, and the line of user code that caused it.

The trace is a table as text, and counts what it saw::

    with CommTrace() as trace:
        loss = model(batch); loss.backward()
    print(trace)
    trace.counts["all_reduce"]
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.context import in_backward

if TYPE_CHECKING:
    from hyper_parallel.sharding.mesh import AxisGroup

__all__ = ["CommEvent", "CommTrace"]

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_SKIPPED = (_PACKAGE + os.sep, os.path.dirname(torch.__file__) + os.sep, contextlib.__file__)


@dataclass(frozen=True)
class CommEvent:
    """One collective call of this rank.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``scatter``, ``gather``.
        nbytes: size of the largest buffer that this rank passes to the call, in bytes.
        axes: mesh axes of the group, by index in their mesh.
        mesh_axes: names of all axes of that mesh, which is not the same for all events of a program.
        ranks: number of ranks in the group.
        change: the layout change, e.g. ``S(0) -> R``, or a description.
        where: ``file:line`` of the user's call; for a backward collective, of the forward call it belongs to.
        phase: ``forward`` or ``backward``.
    """

    op: str
    nbytes: int
    axes: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    ranks: int
    change: str
    where: str
    phase: str

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes of the group."""
        return tuple(self.mesh_axes[axis] for axis in self.axes)


@dataclass(frozen=True)
class LayoutChange:
    """A tensor's change of layout, with or without communication.

    Attributes:
        change: the layouts before and after, e.g. ``S(0) -> R``.
        where: ``file:line``, as in :class:`CommEvent`.
        phase: ``forward`` or ``backward``.
        mesh_axes: names of the mesh axes for which the layouts give one placement each.
    """

    change: str
    where: str
    phase: str
    mesh_axes: tuple[str, ...] = ()


class CommTrace:
    """Context manager that collects the :class:`CommEvent` s and :class:`LayoutChange` s of this process.

    Nested traces all record.
    """

    def __init__(self) -> None:
        self.events: list[CommEvent] = []
        self.changes: list[LayoutChange] = []

    @property
    def counts(self) -> Counter[str]:
        """How often each collective ran."""
        return Counter(event.op for event in self.events)

    @property
    def nbytes(self) -> int:
        """Sum of all events' bytes."""
        return sum(event.nbytes for event in self.events)

    def phase(self, phase: str) -> Counter[str]:
        """How often each collective ran in ``forward`` or ``backward``."""
        return Counter(event.op for event in self.events if event.phase == phase)

    def __enter__(self) -> CommTrace:
        _active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _active.remove(self)

    def __str__(self) -> str:
        rows = [("OP", "BYTES", "AXES", "RANKS", "PHASE", "CHANGE", "WHERE")]
        rows += [
            (e.op, str(e.nbytes), ",".join(e.axis_names), str(e.ranks), e.phase, e.change, e.where) for e in self.events
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[6]]) for r in rows)


_active: Any = []  # of CommTrace


class _Running:
    """The redistribution that is running."""

    context: LayoutChange | None = None


_running: Any = _Running()


@contextlib.contextmanager
def per_thread(active: Any, running: Any) -> Iterator[None]:
    """Inside, use these in the place of the process's own: for ranks that are threads."""
    global _active, _running
    outer = _active, _running
    _active, _running = active, running
    try:
        yield
    finally:
        _active, _running = outer


def is_tracing() -> bool:
    """Whether some :class:`CommTrace` is collecting; what is only said to it need not be worked out otherwise."""
    return bool(_active)


def user_line() -> str:
    """``file:line`` of the innermost frame outside this library and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(_SKIPPED) or frame.f_globals.get("__name__", "").startswith("hyper_parallel_")
        if not ours and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@contextlib.contextmanager
def described(
    change: str, where: str | None = None, phase: str = "forward", mesh_axes: tuple[str, ...] = ()
) -> Iterator[None]:
    """Say what the collectives inside are for: the parts of a :class:`LayoutChange`."""
    outer = getattr(_running, "context", None)
    _running.context = LayoutChange(change, where or user_line(), phase, mesh_axes)
    for trace in _active:
        trace.changes.append(_running.context)
    try:
        yield
    finally:
        _running.context = outer


def record(op: str, tensor: torch.Tensor, group: AxisGroup) -> None:
    """Note one collective; called by :mod:`hyper_parallel.comm.primitives` only while tracing."""
    told = getattr(_running, "context", None) or LayoutChange("", user_line(), "forward")
    phase = "backward" if in_backward() else told.phase  # an operator's own
    nbytes = tensor.numel() * tensor.element_size()
    event = CommEvent(op, nbytes, group.axes, group.mesh_axes, group.size, told.change, told.where, phase)
    for trace in _active:
        trace.events.append(event)
