"""Run the plan of an operator that writes its first argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.dispatch.plan import Plan, finish
from hyper_parallel.tensor import autograd_bridge
from hyper_parallel.tensor.in_place import before_write, flag_varying
from hyper_parallel.tensor.views import carry, root_of


def run_inplace(plan: Plan, args: Sequence[Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
    """Write the target's local tensor; the target keeps its identity and placements, and may turn varying."""
    target = args[0]
    if isinstance(target, (list, tuple)):  # foreach and fused operators
        for tensor in target:
            before_write(tensor)
        plan.call(*local_args, **local_kwargs)
        return None
    before_write(target, carried=True)
    before = local_args[0].requires_grad
    out = plan.call(*local_args, **local_kwargs)
    if plan.is_new:
        if out is NotImplemented:  # x **= "a": Python asks the other operand
            return out
        finish(plan, out)
    spec = plan.spec or plan.specs[0] if plan.specs else None
    if spec is not None and spec.varying != target._spec.varying:
        flag_varying(target, spec.varying)
    if local_args[0].requires_grad and not before:
        autograd_bridge.set_wrapper_requires_grad(target, True)
    carry(root_of(target))
    return target
