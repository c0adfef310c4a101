"""Which functions of a training step have a distributed rule, who provides it, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hyper_parallel.analysis.core_functions import is_answered_by_core
from hyper_parallel.analysis.function_trace import FunctionTrace
from hyper_parallel.analysis.sample_models import SampleModel
from hyper_parallel.errors import OpConflictError, PluginError
from hyper_parallel.registry import Registry
from hyper_parallel.registry.messages import known_pack
from hyper_parallel.utils.function_names import display_name

__all__ = ["FunctionCoverage", "coverage_of", "trace_training_step"]

Status = Literal["ok", "missing", "conflict", "broken"]


@dataclass(frozen=True)
class FunctionCoverage:
    """One torch function.

    Attributes:
        name: its readable name.
        calls: how often the step calls it on tensors that would be sharded.
        status: ``ok`` when there is a rule, or none is needed; ``missing``; ``conflict`` when several plugins have one
            and nothing says which is meant; ``broken`` when the rule's class cannot be used.
        provider: the plugin whose rule serves it, ``core``, or None.
        source: ``file:line`` of the rule's registration, or None.
        pack: for a missing one, the pip package of ours that has a rule.
        where: ``file:line`` of the first call.
        reason: what is wrong, empty when nothing is.
    """

    name: str
    calls: int
    status: Status
    provider: str | None
    source: str | None
    pack: str | None
    where: str
    reason: str = ""


def trace_training_step(sample: SampleModel) -> FunctionTrace:
    """One step of AdamW with gradient clipping, forward and backward traced with it."""
    model = sample.model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Not fused and not foreach: DTensor parameters are stepped one by one unless the user asks otherwise.
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    with FunctionTrace([*model.parameters(), *model.buffers(), *sample.tensors()]) as trace:
        sample.loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return trace


def coverage_of(trace: FunctionTrace, registry: Registry) -> list[FunctionCoverage]:
    """What the registry says to every function of a trace; those that are not in order first."""
    found = [_coverage(func, calls, trace.where[func], registry) for func, calls in trace.counts.items()]
    merged: dict[str, FunctionCoverage] = {}
    for one in found:  # torch.add and Tensor.add are told apart, the forms of one of them are not
        known = merged.get(one.name)
        merged[one.name] = one if known is None else _added(known, one)
    return sorted(merged.values(), key=lambda one: (one.status == "ok", one.name))


def _coverage(func: Callable[..., Any], calls: int, where: str, registry: Registry) -> FunctionCoverage:
    name = display_name(func).removesuffix(".__get__")
    if is_answered_by_core(func):
        return FunctionCoverage(name, calls, "ok", "core", None, None, where)
    try:
        entry = registry.find_entry(func)
        if entry is None:
            pack = known_pack(display_name(func))
            return FunctionCoverage(
                name, calls, "missing", None, None, pack, where, "no installed plugin has a rule for it"
            )
        assert entry.op is not None  # made here, so that a class that cannot be used is found
    except OpConflictError as error:
        return FunctionCoverage(name, calls, "conflict", None, None, None, where, str(error))
    except PluginError as error:
        return FunctionCoverage(name, calls, "broken", error.plugin, None, None, where, str(error))
    return FunctionCoverage(name, calls, "ok", entry.provider, entry.source, None, where)


def _added(first: FunctionCoverage, second: FunctionCoverage) -> FunctionCoverage:
    worse = second if first.status == "ok" else first
    return FunctionCoverage(
        worse.name,
        first.calls + second.calls,
        worse.status,
        worse.provider,
        worse.source,
        worse.pack,
        worse.where,
        worse.reason,
    )
