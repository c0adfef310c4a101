"""Operators that use the three phases of :class:`~hyper_parallel._rules.op.DistributedOp` themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Solution, refuse
from hyper_parallel.comm.redistribute import varying_axes
from hyper_parallel.context import state
from hyper_parallel.dispatch.arguments import lifted, make_call, on_locals
from hyper_parallel.dispatch.cache_key import ALL_BY_VALUE, scan
from hyper_parallel.dispatch.cross_mesh import common_mesh, on_mesh
from hyper_parallel.dispatch.entry import DispatchEntry
from hyper_parallel.dispatch.gradient_types import entering_varying, output_varying
from hyper_parallel.dispatch.in_place import run_inplace
from hyper_parallel.dispatch.plan import Plan, changes_of, in_order_of, output_specs, wrap_many, wrap_one
from hyper_parallel.dispatch.redistribute_inputs import changed
from hyper_parallel.sharding.layout import Layout, fit_rank
from hyper_parallel.sharding.placements import Replicate, Shard, is_partial
from hyper_parallel.sharding.spec import Spec, is_even, make_spec, stride_like


class ThreePhaseEntry(DispatchEntry):
    """A torch function and the operator that serves it by its three phases, called instead of planned for."""

    __slots__ = ()

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator."""
        return on_locals(func, args, kwargs) if state.mode.skip else _three_phases(self, args, kwargs)


def _three_phases(rule: DispatchEntry, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Redistribute the inputs until they are as the operator wants them, run it, and wrap what comes out."""
    op = rule.op
    args, kwargs = lifted(rule.name, op, args, kwargs)
    while True:
        call = make_call(op, rule, tuple(args), kwargs)
        mesh = common_mesh(call) if op.one_mesh else None
        if mesh is not None:
            args, kwargs = on_mesh(args, kwargs, mesh)
            continue
        local_args, local_kwargs, values = op.preprocess(args, kwargs)
        plan, result = _plan_of(rule, call, args, kwargs, values)
        if plan.changes is None:
            break
        args, kwargs = changed(args, kwargs, plan, rule.inplace)
    local = plan.call or op.get_expand_impl(rule.func, result, values) or rule.func
    if rule.inplace:
        running = Plan()
        running.call, running.specs = local, plan.specs
        return run_inplace(running, args, list(local_args), local_kwargs)
    out = local(*local_args, **local_kwargs)
    if not plan.specs:
        plan.specs = _specs_from_local(rule, call, result[0], out)
    return _wrapped(in_order_of(out, plan.specs), plan.specs)


def _wrapped(out: Any, specs: tuple[Spec | None, ...]) -> Any:
    if isinstance(out, (tuple, list)):
        return wrap_many(out, specs)
    return wrap_one(out, specs[0]) if specs[0] is not None else out


def _plan_of(
    rule: DispatchEntry, call: Call, args: Sequence[Any], kwargs: dict[str, Any], values: Any
) -> tuple[Plan, Any]:
    """The plan for these arguments and what the operator inferred, both remembered."""
    grad = torch.is_grad_enabled()
    parts: list[Any] = [grad, state.mode, *kwargs]
    for given in (args, kwargs.values()):
        scan(given, parts, [], grad, ALL_BY_VALUE)
    key = tuple(parts)
    found = rule.cache.get(key)
    if found is None:
        found = _infer_generic(rule, call, _solution_of(rule, call), values)
        rule.remember(key, found)
    return found


def _solution_of(rule: DispatchEntry, call: Call) -> Solution:
    """The inputs as they are, their pending sums carried out where the operator does not take them."""
    solution = Solution([spec.layout for spec in call.inputs], [])
    if not rule.op.allow_partial_inputs and state.mode.policy != "strict":
        solution.targets = [
            s.layout.with_placements({a: Replicate() for a, p in enumerate(s.layout.placements) if is_partial(p)})
            for s in call.inputs
        ]
    return solution


def _infer_generic(rule: DispatchEntry, call: Call, solution: Solution, values: Any) -> tuple[Plan, Any]:
    plan = Plan()
    varying = entering_varying(call, solution)
    for i, (target, word) in enumerate(zip(solution.targets, rule.grad_placements or (), strict=False)):
        if word is not None:
            varying[i] = varying_axes(target, word)  # the function's own word
    plan.changes = changes_of(call, solution, varying) or None
    if plan.changes is not None:
        return plan, None
    outputs, extra = rule.op.infer(values)
    if not rule.op.allow_partial_inputs:
        rule.op._check_partial_inputs([s.layout for s in call.inputs])
    if rule.op.cache_expand:
        plan.call = rule.op.get_expand_impl(rule.func, (outputs, extra), values) or rule.func
    return plan, (outputs, extra)


def _specs_from_local(rule: DispatchEntry, call: Call, layouts: Sequence[Any], out: Any) -> tuple[Spec | None, ...]:
    """Specs of the outputs of an operator that says only their layouts.

    Global shapes come from the function on meta tensors. Without meta support they follow from the local ones, as long
    as all ranks hold as much of every input.

    Raises:
        RedistributionError: neither is the case.
    """
    values = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    bound = [layout.bind() if isinstance(layout, Layout) else None for layout in layouts]
    solution = Solution([s.layout for s in call.inputs], bound)
    tensors = iter(bound)
    specs: list[Spec | None] = []
    failure: Exception | None = None
    try:
        result = call.meta_result()
    except Exception as error:  # no kernel, or one that needs the values or asserts a device
        failure = error
    else:
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if [isinstance(v, torch.Tensor) for v in results] == [isinstance(v, torch.Tensor) for v in values]:
            return output_specs(rule, call, solution)[0]
    if not all(is_even(s.layout, s.shape) for s in call.inputs):
        why = "returns something else than on real ones" if failure is None else f"fails ({failure})"
        raise refuse(
            call,
            f"the global shape of its result is not known: on meta tensors the function {why}, and the ranks hold "
            "unequal parts",
            "make the function work on meta tensors (torch.library.register_fake), or redistribute the input",
        ) from failure
    for position, value in enumerate(values):
        layout = next(tensors, None) if isinstance(value, torch.Tensor) else None
        if layout is None:
            specs.append(None)
            continue
        layout = fit_rank(layout, value.ndim)
        shape = list(value.shape)
        for axis, placement in enumerate(layout.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] *= layout.mesh_shape[axis]
        varying = output_varying(call, solution, layout, position)
        specs.append(make_spec(layout, shape, stride_like(value, shape, layout), value.dtype, varying))
    return tuple(specs)
