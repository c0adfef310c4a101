"""What a rule takes and gives, as a table: the rows it lists, or, for a rule that decides in code, what it accepted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel._rules.call import Call
from hyper_parallel._rules.matching import Row
from hyper_parallel._rules.op import DistributedOp, FunctionOp
from hyper_parallel._rules.strategy import LayoutOp, P, S, StrategyOp
from hyper_parallel.analysis.fake_world import fake_mesh
from hyper_parallel.analysis.sample_calls import SampleCall, sample_calls
from hyper_parallel.context import redistribute_policy
from hyper_parallel.dispatch.arguments import make_call
from hyper_parallel.dispatch.entry import DispatchEntry
from hyper_parallel.registry.op_entry import OpEntry
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Placement, Replicate, is_replicate, is_shard, short
from hyper_parallel.sharding.spec import make_spec
from hyper_parallel.tensor.dtensor import wrap

__all__ = ["StrategyTable", "kind_of", "strategy_tables"]

MAX_TRIES = 200
"""Combinations of placements that are tried on a rule that decides in code."""

_KINDS = (
    (StrategyOp, "strategies", "strategies for one mesh axis; inputs that are all R are always taken"),
    (LayoutOp, "code", "decides in code; these are the ones it took, of all that were tried"),
    (FunctionOp, "function", "is a function of other operators: their rules decide"),
    (DistributedOp, "phases", "uses the three phases itself: infer_layout decides, in code"),
)


@dataclass(frozen=True)
class StrategyTable:
    """The rows of one sample call, for one mesh axis.

    Attributes:
        call: the call, readable.
        inputs: names of the tensor arguments.
        rows: placements of the inputs, and of the outputs.
    """

    call: str
    inputs: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def kind_of(op: DistributedOp) -> tuple[str, str]:
    """How a rule is written, in a word and in a sentence."""
    return next((word, text) for base, word, text in _KINDS if isinstance(op, base))


def strategy_tables(entry: OpEntry) -> list[StrategyTable]:
    """One table per sample call; none where no call can be made up, or the rule does not decide by layouts alone.

    Needs a process group of at least two ranks, such as a fake world's.
    """
    op = entry.op
    if not isinstance(op, LayoutOp):
        return []
    found = []
    for sample in sample_calls(entry.name):
        rows = _listed(op, sample) if isinstance(op, StrategyOp) else _tried(op, sample)
        if rows:
            found.append(StrategyTable(str(sample), tuple(sample.tensor_names), tuple(rows)))
    return found


def _listed(op: StrategyOp, sample: SampleCall) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    count = len(sample.tensor_names)
    try:
        call = _call(op, sample, [Replicate()] * count)
        rows = [Row.of(op, call, strategy, op.num_outputs(call)) for strategy in op.strategies(call)]
    except Exception:  # a made-up call that the rule, unlike the function, does not accept
        return []
    ranks = [len(spec.shape) for spec in call.inputs]
    if any(is_shard(p) and p.dim >= ndim for row in rows for p, ndim in zip(row.inputs, ranks, strict=True)):
        return []  # nor is this one meant
    return [(tuple(map(short, row.inputs)), tuple(map(short, row.outputs))) for row in rows]


def _tried(op: LayoutOp, sample: SampleCall) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    choices: list[list[Placement]] = [
        [Replicate(), *(S(d) for d in range(t.ndim)), P] for t in _tensors(sample.arguments.values())
    ]
    rows = []
    for placements in itertools.islice(itertools.product(*choices), MAX_TRIES):
        if all(map(is_replicate, placements)):
            continue
        try:
            with redistribute_policy("strict"):
                call = _call(op, sample, placements)
                solution = op.solve(call)
        except Exception:  # refused
            continue
        if all(target is spec.layout for target, spec in zip(solution.targets, call.inputs, strict=True)):
            outputs = tuple(short(layout.placements[0]) for layout in solution.outputs if layout is not None)
            rows.append((tuple(map(short, placements)), outputs))
    return rows


def _call(op: LayoutOp, sample: SampleCall, placements: Any) -> Call:
    mesh = fake_mesh({"axis": torch.distributed.get_world_size()})
    given = iter(placements)

    def laid_out(value: Any) -> Any:
        if isinstance(value, list):
            return [laid_out(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        layout = Layout.from_placements(mesh, [next(given)], ndim=value.ndim)
        local = torch.empty(0, dtype=value.dtype, device="meta", requires_grad=value.is_floating_point())
        return wrap(local, make_spec(layout, tuple(value.shape), value.stride(), value.dtype))

    arguments = tuple(laid_out(value) for value in sample.arguments.values())
    name = getattr(sample.func, "__name__", op.op_name)
    return make_call(op, DispatchEntry(sample.func, op, name), arguments, {})


def _tensors(values: Any) -> list[torch.Tensor]:
    flat = itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in values)
    return [value for value in flat if isinstance(value, torch.Tensor)]
