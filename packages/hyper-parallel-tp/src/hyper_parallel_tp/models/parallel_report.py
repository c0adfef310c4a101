"""``parallel_report``: what of a model is sharded, what is whole and why, what is sent, and what memory it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel import CommTrace
from hyper_parallel_tp.models.blocks import inside_adapters
from hyper_parallel_tp.models.record import AXIS_OF_DEGREE, Held, Parallelized, held_by, record_of, whole_over

__all__ = ["ParallelReport", "BlockTraffic", "parallel_report"]

SHOWN = 12
"""How many whole parameters are named; the sums are of all."""


@dataclass(frozen=True)
class BlockTraffic:
    """Collectives of one part of a model in one step.

    Attributes:
        forward, backward: how often each collective ran.
        nbytes: bytes of their buffers on this rank.
    """

    forward: Mapping[str, int]
    backward: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True)
class ParallelReport:
    """See :func:`parallel_report`. Printed, it is a page of text.

    Attributes:
        parameters: each parameter with its bytes, this rank's bytes, and the axes that shard it.
        reasons: for modules or parameters that stay whole, why.
        sent: per block of the model, and under ``""`` for the rest of the step; empty without a batch.
        memory: bytes on this rank of parameters, of their gradients, and of AdamW's two moments.
    """

    plan: Parallelized
    parameters: tuple[Held, ...]
    reasons: Mapping[str, str]
    sent: Mapping[str, BlockTraffic]
    memory: Mapping[str, int]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def parallel_report(model: nn.Module, batch: Mapping[str, Any] | None = None) -> ParallelReport:
    """What :func:`parallelize` made of a model.

    Args:
        model: what it returned.
        batch: keyword arguments of a training step, this rank's part. One forward and backward is then run, and the
            report says which collectives each block takes; gradients are left as they were. All ranks call it.

    Raises:
        ValueError: the model was not given to :func:`parallelize`.
    """
    record, base = record_of(model), inside_adapters(model)
    held = tuple(held_by(base))
    mine = sum(each.local for each in held)
    trained = {name for name, p in base.named_parameters() if p.requires_grad}
    gradients = sum(each.local for each in held if each.name in trained)
    memory = {"parameters": mine, "gradients": gradients, "AdamW": 2 * gradients}
    sent = {} if batch is None else _sent(model, record, batch)
    return ParallelReport(record, held, dict(record.plan.reasons), sent, memory)


def _lines(report: ParallelReport) -> Iterator[str]:
    record, held = report.plan, report.parameters
    degrees = {name: getattr(record.dims, name) for name in ("dp_replicate", "dp_shard", "tp")}
    degrees = {name: degree for name, degree in degrees.items() if degree > 1}
    yield f"plan: {record.plan.source}"
    yield f"axes: {', '.join(f'{name}={degree}' for name, degree in degrees.items()) or 'one rank'}"
    options = {"sequence_parallel": record.plan.sequence_parallel, "loss_parallel": record.plan.loss_parallel}
    chosen = [f"{name}={'as the plan says' if value is None else value}" for name, value in options.items()]
    yield f"{', '.join(chosen)}, checkpointing={record.checkpointing!r}, {len(record.blocks)} blocks"
    total = sum(each.nbytes for each in held)
    yield f"parameters: {_size(total)}, {_size(report.memory['parameters'])} of them on this rank"
    for axis, name in AXIS_OF_DEGREE.items():
        if degrees.get(axis):
            whole = whole_over(held, name)
            left = sum(each.nbytes for each in whole)
            yield f"  over {axis}: {_size(total - left)} sharded, {_size(left)} whole"
            yield from _whole_lines(whole, report.reasons if axis == "tp" else {})
    gradients, moments = _size(report.memory["gradients"]), _size(report.memory["AdamW"])
    yield f"memory on this rank, without activations: gradients {gradients}, AdamW {moments}"
    for name, sent in report.sent.items():
        counts = f"forward {_counts(sent.forward)}; backward {_counts(sent.backward)}"
        yield f"  {name or 'the rest'}: {counts}; {_size(sent.nbytes)}"


def _whole_lines(whole: list[Held], reasons: Mapping[str, str]) -> Iterator[str]:
    largest = sorted(whole, key=lambda each: -each.nbytes)
    for each in largest[:SHOWN]:
        why = _reason(each.name, reasons)
        yield f"    {each.name}: {_size(each.nbytes)}{f', {why}' if why else ''}"
    if len(largest) > SHOWN:
        yield f"    and {len(largest) - SHOWN} smaller ones"


def _reason(name: str, reasons: Mapping[str, str]) -> str:
    """Why a parameter is whole: said of itself, or of the innermost module that says it."""
    while name and name not in reasons:
        name = name.rpartition(".")[0]
    return reasons.get(name, "")


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024  # type: ignore[assignment]
    return f"{nbytes:.4g} {unit}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in sorted(counts.items())) or "nothing"


def _sent(model: nn.Module, record: Parallelized, batch: Mapping[str, Any]) -> dict[str, BlockTraffic]:
    """The collectives of one step by block: those of its forward, and of the backward of what was computed there."""
    with CommTrace() as step, _gradients_kept(model), _traced(record.blocks) as inside:
        output = model(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = (output[0] if isinstance(output, tuple) else getattr(output, "logits", output)).float().sum()
        loss.backward()
    per_block = {name: list(events) for name, events in inside.items()}
    taken = Counter(id(event) for events in per_block.values() for event in events)
    per_block[""] = [event for event in step.events if id(event) not in taken]
    return {name: _summed(events) for name, events in per_block.items()}


def _summed(events: Iterable[Any]) -> BlockTraffic:
    events = list(events)
    phases = {phase: Counter(e.op for e in events if e.phase == phase) for phase in ("forward", "backward")}
    return BlockTraffic(phases["forward"], phases["backward"], sum(e.nbytes for e in events))


@contextmanager
def _traced(blocks: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Any]]]:
    """Per block, the events between the beginning and the end of its forward and of its backward."""
    events: dict[str, list[Any]] = {name: [] for name in blocks}
    running: dict[str, CommTrace] = {}

    def begin(name: str) -> None:
        running.setdefault(name, CommTrace().__enter__())

    def end(name: str) -> None:
        trace = running.pop(name, None)
        if trace is not None:
            trace.__exit__(None, None, None)
            events[name] += trace.events

    handles = []
    for name, block in blocks.items():
        handles += [
            block.register_forward_pre_hook(lambda *_, name=name: begin(name), prepend=True),
            block.register_forward_hook(lambda *_, name=name: end(name)),
            block.register_full_backward_pre_hook(lambda *_, name=name: begin(name)),
            block.register_full_backward_hook(lambda *_, name=name: end(name)),
        ]
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()
        for name in list(running):  # its input wants no gradient, so its backward ended without saying so
            end(name)


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Leave the gradients of a model as they were."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
