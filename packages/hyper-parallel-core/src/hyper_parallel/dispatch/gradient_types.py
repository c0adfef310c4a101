"""Which inputs of a call enter as varying, and which of its results are: "the rule" of docs/gradient-types.md."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel._rules.call import Call, Solution
from hyper_parallel.dispatch.arguments import make_call_of
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import is_replicate
from hyper_parallel.sharding.spec import NOT_VARYING
from hyper_parallel.tensor.dtensor import DTensor


def needs_varying(call: Call, solution: Solution) -> list[frozenset[int]]:
    """Per input the axes on which it must enter as varying: "the rule" of docs/gradient-types.md.

    On an axis where a counted input is sharded, pending or varying, every rank computes its own part, so the gradient
    of a Replicate input arrives in terms.
    """
    needed = [NOT_VARYING] * len(call.inputs)
    if not any(call.needs_grad):
        return needed
    counted = [i for i in range(len(call.inputs)) if i not in solution.uncounted]
    for axis in range(call.info.ndim):
        active = any(
            not is_replicate(solution.targets[i].placements[axis])
            or (call.needs_grad[i] and axis in call.inputs[i].varying)
            for i in counted
        )
        if not active:
            continue
        for i in counted:
            if call.needs_grad[i] and not solution.is_invariant(axis, i):
                if is_replicate(solution.targets[i].placements[axis]):
                    needed[i] |= {axis}
    return needed


def entering_varying(call: Call, solution: Solution) -> list[frozenset[int]]:
    """Per input the axes on which it enters as varying: where it must, and where it is varying and stays Replicate."""
    axes = needs_varying(call, solution)
    for index, (spec, target) in enumerate(zip(call.inputs, solution.targets, strict=True)):
        if spec.varying:
            axes[index] |= {a for a in spec.varying if is_replicate(target.placements[a])}
    return axes


def vary_axes(tensors: Sequence[DTensor]) -> list[frozenset[int]]:
    """The rule of :func:`needs_varying` for tensors that one local computation reads together."""
    call = make_call_of(tensors)
    return needs_varying(call, Solution([t.layout for t in tensors], []))


def output_varying(call: Call, solution: Solution, layout: Layout, output: int) -> frozenset[int]:
    """Axes on which a Replicate output is varying: those where all counted inputs are Replicate and one is varying."""
    varying: set[int] = set()
    if not any(spec.varying for spec in call.inputs):
        return NOT_VARYING
    for axis, placement in enumerate(layout.placements):
        if not is_replicate(placement) or (solution.reduced and axis in solution.reduced[output]):
            continue
        counted = [
            i for i in range(len(call.inputs)) if i not in solution.uncounted and not solution.is_invariant(axis, i)
        ]
        replicated = all(is_replicate(solution.targets[i].placements[axis]) for i in counted)
        if replicated and any(call.needs_grad[i] and axis in call.inputs[i].varying for i in counted):
            varying.add(axis)
    return frozenset(varying)
