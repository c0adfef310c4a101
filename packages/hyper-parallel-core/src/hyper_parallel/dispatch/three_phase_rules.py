"""Operators that use the three phases of :class:`~hyper_parallel._rules.op.DistributedOp` themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Solution, refuse
from hyper_parallel._rules.op import DistributedOp
from hyper_parallel.comm import primitives as comm
from hyper_parallel.comm.redistribute import varying_axes
from hyper_parallel.context import state
from hyper_parallel.dispatch.arguments import lifted, make_call, on_locals
from hyper_parallel.dispatch.cache_key import ALL_BY_VALUE, scan
from hyper_parallel.dispatch.cross_mesh import common_mesh, on_mesh
from hyper_parallel.dispatch.entry import DispatchEntry
from hyper_parallel.dispatch.gradient_types import entering_varying, output_varying
from hyper_parallel.dispatch.in_place import run_inplace
from hyper_parallel.dispatch.plan import Plan, changes_of, in_order_of, output_specs, wrap_many, wrap_one
from hyper_parallel.dispatch.plan_cache import PlanBudget, PlanCache
from hyper_parallel.dispatch.redistribute_inputs import changed
from hyper_parallel.sharding.layout import Layout, fit_rank
from hyper_parallel.sharding.placements import Replicate, is_partial
from hyper_parallel.sharding.spec import Spec, is_even, make_spec, stride_like
from hyper_parallel.tensor.shapes_of_pieces import global_shapes

_PLANS_OF_ONE = 4 * 2**20  # bytes


class ThreePhaseEntry(DispatchEntry):
    """A torch function and the operator that serves it by its three phases, called instead of planned for.

    Making a plan may communicate. So its plans have bytes of their own, which only calls of this function take: what
    one rank alone does with other functions never makes it plan anew where the other ranks do not.
    """

    __slots__ = ()

    def __init__(self, func: Callable[..., Any], op: DistributedOp, name: str) -> None:
        super().__init__(func, op, name)
        self.plans = PlanCache(PlanBudget(_PLANS_OF_ONE))
        self.cache = self.plans.young

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
    specs = plan.specs or _specs_of(rule, call, result[0], out, plan)
    return _wrapped(in_order_of(out, specs), specs)


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
    found = rule.cache.get(key) or rule.recall(key)
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


def _specs_of(rule: DispatchEntry, call: Call, layouts: Sequence[Any], out: Any, plan: Plan) -> tuple[Spec | None, ...]:
    """Specs of the outputs of an operator that says only their layouts.

    Global shapes come from the function on meta tensors; they follow from the arguments, and are kept in the plan.
    Without meta support they are what the local results of this call add up to.
    """
    values = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    bound = [layout.bind() if isinstance(layout, Layout) else None for layout in layouts]
    solution = Solution([s.layout for s in call.inputs], bound)
    try:
        result = call.meta_result()
    except Exception:  # no kernel, or one that needs the values or asserts a device
        return _specs_from_pieces(rule, call, solution, values)
    results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if [isinstance(v, torch.Tensor) for v in results] != [isinstance(v, torch.Tensor) for v in values]:
        return _specs_from_pieces(rule, call, solution, values)
    specs = output_specs(call, solution)[0]
    _check_pieces(call, specs, values)
    plan.specs = specs
    return specs


def _specs_from_pieces(
    rule: DispatchEntry, call: Call, solution: Solution, values: Sequence[Any]
) -> tuple[Spec | None, ...]:
    layouts = iter(solution.outputs)
    placed = [(v, next(layouts, None)) if isinstance(v, torch.Tensor) else (v, None) for v in values]
    fitted = [None if layout is None else fit_rank(layout, v.ndim) for v, layout in placed]
    pieces = [(v.shape, layout) for v, layout in zip(values, fitted, strict=True) if layout is not None]
    shapes = iter(global_shapes(pieces, rule.name))
    specs: list[Spec | None] = []
    for value, layout in zip(values, fitted, strict=True):
        if layout is None:
            specs.append(None)
            continue
        shape, position = next(shapes), sum(spec is not None for spec in specs)
        varying = output_varying(call, solution, layout, position)
        specs.append(make_spec(layout, shape, stride_like(value, shape, layout), value.dtype, varying))
    return tuple(specs)


def _check_pieces(call: Call, specs: Sequence[Spec | None], values: Sequence[Any]) -> None:
    """Raise RedistributionError, on every rank, where a rank's result is not the piece that its spec says."""
    made = [(value, spec) for value, spec in zip(values, specs, strict=True) if spec is not None]
    wrong = [(value, spec) for value, spec in made if value.shape != spec.local_shape]
    if not all(is_even(spec.layout, spec.shape) for spec in (*call.inputs, *(spec for _, spec in made))):
        found = torch.tensor(len(wrong), device=call.info.default_device())
        comm.all_reduce(found, call.info.group(tuple(range(call.info.ndim))), "max")
        if int(found) and not wrong:
            wrong = made[:1]
    if wrong:
        value, spec = wrong[0]
        raise refuse(
            call,
            f"its local result has the shape {tuple(value.shape)} here; {spec.layout} of the global shape "
            f"{tuple(spec.shape)}, which the function gives on meta tensors, has {spec.local_shape}. On some rank the "
            "two differ",
            "let get_expand_impl return the piece that infer_layout says, or let infer_layout say another layout",
        )
