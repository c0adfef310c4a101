"""Operators that use the three phases of :class:`~hyper_parallel._rules.op.DistributedOp` themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Solution, refuse
from hyper_parallel.comm import primitives as comm
from hyper_parallel.comm.redistribute import varying_axes
from hyper_parallel.context import state
from hyper_parallel.dispatch.arguments import lifted, make_call, on_locals
from hyper_parallel.dispatch.cache_key import scan
from hyper_parallel.dispatch.cross_mesh import common_mesh, on_mesh
from hyper_parallel.dispatch.plan import (
    DispatchEntry,
    Plan,
    in_order_of,
    needs_varying,
    output_specs,
    output_varying,
    wrap_many,
    wrap_one,
)
from hyper_parallel.dispatch.redistribute_inputs import changed
from hyper_parallel.sharding.layout import Layout, fit_rank
from hyper_parallel.sharding.placements import Replicate, is_partial, is_replicate
from hyper_parallel.sharding.spec import Spec, is_even, make_spec, stride_like
from hyper_parallel.tensor.in_place import run_inplace
from hyper_parallel.tensor.shapes_of_pieces import global_shapes


class ThreePhaseEntry(DispatchEntry):
    """A torch function and the operator that serves it by its three phases, called instead of planned for."""

    __slots__ = ()

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator."""
        return on_locals(func, args, kwargs) if state.mode.skip else _three_phases(self, args, kwargs)


def _three_phases(rule: DispatchEntry, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    op = rule.op
    args, kwargs = lifted(rule.name, op, args, kwargs)
    call = make_call(op, rule, tuple(args), kwargs)
    mesh = common_mesh(call) if op.one_mesh else None
    if mesh is not None:
        return _three_phases(rule, *on_mesh(args, kwargs, mesh))
    solution = Solution([spec.layout for spec in call.inputs], [])
    if not op.allow_partial_inputs and state.mode.policy != "strict":
        solution.targets = [
            s.layout.with_placements({a: Replicate() for a, p in enumerate(s.layout.placements) if is_partial(p)})
            for s in call.inputs
        ]
    local_args, local_kwargs, values = op.preprocess(args, kwargs)
    parts: list[Any] = [torch.is_grad_enabled(), state.mode, *kwargs]
    for given in (args, kwargs.values()):
        scan(given, parts, [], torch.is_grad_enabled(), 2)
    key = tuple(parts)
    found = rule.cache.get(key) or rule.recall(key)
    if found is None:
        found = _infer_generic(rule, call, solution, values)
        rule.remember(key, found)
    plan, result = found
    if plan.changes is not None:
        return _three_phases(rule, *changed(args, kwargs, plan, rule.inplace))
    local = plan.call or op.get_expand_impl(rule.func, result, values) or rule.func
    if rule.inplace:
        running = Plan()
        running.call, running.specs = local, plan.specs
        return run_inplace(running, args, list(local_args), local_kwargs)
    out = local(*local_args, **local_kwargs)
    specs = plan.specs or _specs_of(rule, call, result[0], out, plan)
    out = in_order_of(out, specs)
    if isinstance(out, (tuple, list)):
        return wrap_many(out, specs)
    return wrap_one(out, specs[0]) if specs[0] is not None else out


def _infer_generic(rule: DispatchEntry, call: Call, solution: Solution, values: Any) -> tuple[Plan, Any]:
    plan = Plan()
    needed = needs_varying(call, solution)
    given = rule.grad_placements or ()
    changes = []
    for i, (s, t) in enumerate(zip(call.inputs, solution.targets, strict=True)):
        varying = frozenset(a for a in s.varying if is_replicate(t.placements[a])) | needed[i]
        if i < len(given) and given[i] is not None:
            varying = varying_axes(t, given[i])  # the function's own word
        changes.append((i, t, varying))
    changes = [c for c in changes if c[1] is not call.inputs[c[0]].layout or c[2] != call.inputs[c[0]].varying]
    if changes:
        plan.changes = changes
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
    specs = output_specs(rule, call, solution)[0]
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
