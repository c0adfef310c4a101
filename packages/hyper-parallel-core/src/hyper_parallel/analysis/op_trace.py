"""Notes every operator on DTensors as it runs: layouts in, changes of layout, collectives, layouts out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hyper_parallel.analysis.core_functions import is_answered_by_core
from hyper_parallel.analysis.module_trace import ModuleTrace
from hyper_parallel.analysis.sample_calls import short_name
from hyper_parallel.comm.redistribute import describe
from hyper_parallel.comm.trace import CommEvent, CommTrace, LayoutChange, user_line
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.torch_compat import pytree

__all__ = ["Collective", "OpStep", "OpTrace", "folded"]

_SHOWN = (torch.autograd.backward, torch.autograd.grad)
BETWEEN = "(outside operators)"
BACKWARD = "(backward)"


@dataclass(frozen=True)
class Collective:
    """A collective call of this rank.

    Attributes:
        op: what it is.
        nbytes: size of its largest buffer.
        axes: names of the mesh axes it goes over.
        ranks: how many ranks take part.
        change: the layout change it belongs to, or ``""``.
    """

    op: str
    nbytes: int
    axes: tuple[str, ...]
    ranks: int
    change: str

    def __str__(self) -> str:
        return f"{self.op} {readable_size(self.nbytes)} over {','.join(self.axes)} ({self.ranks} ranks)"


@dataclass(frozen=True)
class OpStep:
    """One operator, or what was communicated outside of operators.

    Attributes:
        name: the function, or one of ``(outside operators)`` and ``(backward)``.
        where: ``file:line`` of the user's call.
        module: name of the module whose forward ran, with ``*`` for numbers; empty outside of modules.
        inputs, outputs: global shape and layout of each DTensor.
        changes: layout changes that were made for the operator, with those that cost nothing.
        collectives: what was communicated.
        error: what the operator raised, empty when it did not.
    """

    name: str
    where: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    error: str = ""
    module: str = ""


@dataclass
class _TracePosition:
    """How far the lists of a CommTrace have been read."""

    events: int = 0
    changes: int = 0


@dataclass(eq=False)
class OpTrace:
    """Context manager that collects :class:`OpStep` s, in the order in which they ran.

    It is a torch function mode, so that the dispatcher has nothing to do with it and pays nothing for it.

    Attributes:
        steps: what ran.
        modules: which modules ran, and the memory of this rank.
        axis_names: names of the mesh axes for which a layout is written; one on another mesh says so, as ``R on tp``.
            Default: those of the first DTensor.
    """

    axis_names: tuple[str, ...] = ()
    steps: list[OpStep] = field(default_factory=list)
    modules: ModuleTrace = field(default_factory=ModuleTrace)
    _comm: CommTrace = field(default_factory=CommTrace)
    _read: _TracePosition = field(default_factory=_TracePosition)

    def __enter__(self) -> OpTrace:
        self._running = ExitStack()
        self._running.enter_context(self._comm)
        self._running.enter_context(self.modules)
        self._running.enter_context(_RecordingMode(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._running.close()
        self._note_between()

    @property
    def collectives(self) -> list[Collective]:
        """All of them, in order."""
        return [collective for step in self.steps for collective in step.collectives]

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function and note it when it works on DTensors."""
        inputs = list(_dtensors((args, kwargs)))
        if not inputs or (is_answered_by_core(func) and func not in _SHOWN):
            return func(*args, **kwargs)
        self.axis_names = self.axis_names or inputs[0].layout.mesh_dim_names
        self._note_between()
        step = OpStep(short_name(func), user_line(), inputs=tuple(map(self._shown, inputs)), module=self.modules.module)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.steps.append(self._with_communication(replace(step, error=f"{type(error).__name__}: {error}")))
            raise
        outputs = tuple(map(self._shown, _dtensors(result)))
        self.steps.append(self._with_communication(replace(step, outputs=outputs)))
        return result

    def _with_communication(self, step: OpStep) -> OpStep:
        events, changes = self._unread()
        return replace(
            step,
            changes=tuple(map(self._change, filter(_matters, changes))),
            collectives=tuple(map(self._collective, events)),
        )

    def _note_between(self) -> None:
        """What ran since the last operator, ``redistribute`` or the backward pass, each line of code for itself."""
        events, changes = self._unread()
        for name, phase in ((BETWEEN, "forward"), (BACKWARD, "backward")):
            seen = [(c.where, c.phase) for c in changes] + [(e.where, e.phase) for e in events]
            for where in dict.fromkeys(where for where, its_phase in seen if its_phase == phase):
                moved = tuple(self._change(c) for c in changes if (c.where, c.phase) == (where, phase) and _matters(c))
                sent = tuple(self._collective(e) for e in events if (e.where, e.phase) == (where, phase))
                if moved or sent:
                    module = self.modules.module if phase == "forward" else ""
                    self.steps.append(OpStep(name, where, changes=moved, collectives=sent, module=module))

    def _unread(self) -> tuple[list[CommEvent], list[LayoutChange]]:
        events, changes = self._comm.events[self._read.events :], self._comm.changes[self._read.changes :]
        self._read = _TracePosition(len(self._comm.events), len(self._comm.changes))
        return events, changes

    def _collective(self, event: CommEvent) -> Collective:
        change = f"{event.change}{self._where(event.mesh_axes)}" if event.change else ""
        return Collective(event.op, event.nbytes, event.axis_names, event.ranks, change)

    def _change(self, change: LayoutChange) -> str:
        return f"{change.change}{self._where(change.mesh_axes)}"

    def _shown(self, tensor: DTensor) -> str:
        layout = tensor.layout
        return f"{list(tensor.shape)} {describe(layout)}{self._where(layout.mesh_dim_names)}"

    def _where(self, mesh_axes: tuple[str, ...]) -> str:
        """On which mesh a layout is, when it is not the one that the reader is told at the top."""
        return f" on {','.join(mesh_axes)}" if mesh_axes and mesh_axes != self.axis_names else ""


class _RecordingMode(TorchFunctionMode):
    def __init__(self, trace: OpTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._trace.run(func, args, kwargs or {})


def folded(steps: Iterable[OpStep]) -> list[tuple[OpStep, int]]:
    """Equal steps (the same line of code with the same layouts, as the layers of a model give) with their number."""
    counts: dict[OpStep, int] = {}
    for step in steps:
        counts[step] = counts.get(step, 0) + 1
    return list(counts.items())


def readable_size(nbytes: int) -> str:
    """``12 B``, ``3.5 KiB``, ``1.2 GiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _matters(change: LayoutChange) -> bool:
    before, _, after = change.change.partition(" -> ")
    return before != after  # only the gradient's type changed


def _dtensors(value: Any) -> Iterator[DTensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, DTensor))
