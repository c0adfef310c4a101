"""The dispatcher: from a torch function on DTensors to the local call.

A warm call is one dictionary lookup: the key holds the specs of the DTensors (by identity), which of them need a
gradient, and the other arguments. What it finds is a :class:`~hyper_parallel.dispatch.plan.Plan`: the function to run on the
local tensors and the specs of what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hyper_parallel._rules.call import NeedsValue
from hyper_parallel._rules.op import DistributedOp, FunctionOp
from hyper_parallel._rules.strategy import LayoutOp
from hyper_parallel.context import Mode, state
from hyper_parallel.dispatch.arguments import lifted, on_locals, with_value
from hyper_parallel.dispatch.cache_key import scan
from hyper_parallel.dispatch.cross_mesh import on_mesh
from hyper_parallel.dispatch.ops_without_rule import handler_of
from hyper_parallel.dispatch.plan import DispatchEntry, Plan, finish, is_asked, make_plan, wrap_many
from hyper_parallel.dispatch.redistribute_inputs import changed, with_reduced_forms
from hyper_parallel.dispatch.three_phase_rules import ThreePhaseEntry
from hyper_parallel.errors import MissingOpError, RedistributionError
from hyper_parallel.registry.autograd_functions import name_of_served
from hyper_parallel.registry.registry import LISTENERS, default_registry, get_distributed_op
from hyper_parallel.tensor.autograd_bridge import Marks
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import (
    become_view,
    before_write,
    fits_reduced,
    form_of,
    holds_any_value,
    reduce_in_place,
    run_inplace,
    write,
    write_back,
)
from hyper_parallel.tensor.views import assign, note_copies, note_view
from hyper_parallel.tensor.wrapper import new_wrapper
from hyper_parallel.utils.function_names import aten_binding
from hyper_parallel.utils.structures import tensors_of

__all__ = ["dispatch", "register_function"]

_grad_enabled = torch.is_grad_enabled
_SETITEM = torch.Tensor.__setitem__
_rules: dict[Any, Any] = {}


def dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Run ``func`` on arguments that contain DTensors."""
    return torch_function(DTensor, func, (), args, kwargs)


def torch_function(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """``DTensor.__torch_function__``: what needs no plan goes its own way."""
    rule = _rules.get(func)
    if rule.__class__ is not DispatchEntry:
        if rule is None:
            _find(func)
            return dispatch(func, args, kwargs)
        return rule(func, args, kwargs or {})
    mode = state.mode
    if mode.skip:
        return on_locals(func, args, kwargs or {})
    if rule.inplace and isinstance(args[0], torch.Tensor):
        if args[0].__class__ is not DTensor:
            return _into_plain(rule, args, kwargs or {})
        if func is _SETITEM and isinstance(args[2], DTensor) and args[2]._copied_by is not None:
            target, index, value = args
            return assign(target, index, value, partial(_call, rule, mode, args, kwargs, target))
    if kwargs and "out" in kwargs and name_of_served(func) is None:
        return into_out(func, args, kwargs)
    return _call(rule, mode, args, kwargs, args[0] if args else None)


def _call(
    rule: DispatchEntry,
    mode: Mode,
    args: Sequence[Any],
    kwargs: Any,
    source: Any,
    before: Plan | None = None,
    copied: bool = False,
) -> Any:
    """Find the plan for these arguments, and run it; where it asks for other arguments, call again with those.

    Args:
        source: the first argument as the user gave it, of which the result may be a view.
        before: the plan that changed the arguments to these; what it decided holds.
        copied: whether that put a copy in the place of ``source``.
    """
    grad = _grad_enabled()
    key: list[Any] = [grad, mode, before is None]
    local_args: list[Any] = []
    local_kwargs = kwargs
    loose = scan(args, key, local_args, grad, rule.by_value)
    if kwargs and not loose:
        values: list[Any] = []
        key.extend(kwargs)
        loose = scan(kwargs.values(), key, values, grad, rule.by_value)
        local_kwargs = dict(zip(kwargs, values, strict=False))
    if loose:
        return dispatch(rule.func, *lifted(rule.name, rule.op, args, kwargs or {}))
    lookup = tuple(key)
    plan = rule.cache.get(lookup)
    if plan is None or not plan.ready:
        if plan is None:
            plan = rule.recall(lookup)
        read = rule.op.arguments.as_read(rule.func, args, kwargs) if plan is None and kwargs else None  # type: ignore[attr-defined]
        if read is not None:
            named_source = source if args else next(iter(read[0]), None)
            return _call(rule, mode, read[0], read[1], named_source, before, copied)
        writes = rule.flag_at is not None and is_asked(args, kwargs or {}, rule.flag_at)
        if before is None and not writes and (rule.use_reduced if plan is None else plan.pending):
            reduced = with_reduced_forms(args, kwargs or {})
            if reduced is not None:
                return _call(rule, mode, *reduced, source)
        if plan is None:
            try:
                plan = make_plan(rule, args, kwargs or {}, None if before is None else before.solution)
            except NeedsValue as need:
                return _call(rule, mode, *with_value(args, kwargs or {}, need.index), source, before, copied)
            except RedistributionError:
                written = _write_another_way(rule, args, kwargs) if rule.inplace else None
                if written is None:
                    raise
                return written
            rule.remember(lookup, plan)
        if plan.mesh is not None:
            return _call(rule, mode, *on_mesh(args, kwargs or {}, plan.mesh), source, before, copied)
        if plan.changes is not None:
            if writes and any(index == 0 for index, _, _ in plan.changes):
                return write_back(rule.func, args, kwargs or {}, rule.flag_at)  # type: ignore[arg-type]
            args, kwargs = changed(args, kwargs or {}, plan, rule.inplace)
            copied = copied or plan.is_view
            if plan.then is None:
                return _call(rule, mode, args, kwargs, source, plan, copied)
            for place in plan.places or ():
                if isinstance(place, str):
                    local_kwargs[place] = kwargs[place]._resolve()
                else:
                    local_args[place] = args[place]._resolve()
            plan = plan.then
    if before is not None and before.places is not None and plan.ready:
        before.then = plan  # found without a second look-up from now on
    return _run(rule, plan, args, kwargs, local_args, local_kwargs, grad, source, copied)


def _run(
    rule: DispatchEntry,
    plan: Plan,
    args: Sequence[Any],
    kwargs: Any,
    local_args: list[Any],
    local_kwargs: Any,
    grad: bool,
    source: Any,
    copied: bool,
) -> Any:
    """Run a plan on the local tensors and wrap what comes out; ``source`` and ``copied`` as in :func:`_call`."""
    if plan.inplace:
        return run_inplace(plan, args, local_args, local_kwargs or {})
    if rule.flag_at is not None and is_asked(args, kwargs or {}, rule.flag_at):
        before_write(args[0], counted=True)
    out = plan.call(*local_args, **local_kwargs) if local_kwargs else plan.call(*local_args)
    if plan.is_new:
        out = finish(plan, out)
    spec = plan.spec
    if spec is None:
        result = wrap_many(out, plan.specs)
    else:
        if local_args and out is local_args[0] and isinstance(args[0], DTensor) and spec is args[0]._spec:
            return args[0]  # a cast or copy that was none, as in PyTorch; or inplace=True
        if out.dtype is not spec.dtype:  # autocast chose another dtype
            spec = spec.replace(dtype=out.dtype)
        result = new_wrapper(DTensor, out, spec, out.requires_grad)
        result._pending = None if grad else Marks.now
    if plan.is_view:
        views = result if spec is None else (result,)
        if copied or plan.copies:
            op: Any = rule.op
            given = rule.func, (source, *args[1:]), kwargs or {}
            note_copies(views, source, rule.name, partial(op.carry_write, *given) if op.carries_writes else None)
        else:
            for view in views:
                note_view(view, source)
    return result


def _write_another_way(rule: DispatchEntry, args: Sequence[Any], kwargs: Any) -> DTensor | None:
    """An in-place operator whose target does not fit: what is pending in it is carried out, or else the value is
    computed out of place and written as terms; None where neither is possible or allowed."""
    target = args[0]
    if state.mode.policy == "strict" or not isinstance(target, DTensor):
        return None
    if reduce_in_place(target):
        return dispatch(rule.func, args, kwargs)
    out_of_place = form_of(rule.name)
    if out_of_place is None or not holds_any_value(target.layout):
        return None
    value = dispatch(out_of_place, args, kwargs)
    return write(target, value) if state.mode.policy == "auto" or fits_reduced(value, target) else None


DTensor.__torch_function__ = classmethod(torch_function)  # type: ignore[assignment]


# -- finding the rule ---------------------------------------------------------------------------------------------


def _find(func: Callable[..., Any]) -> Any:
    """The rule or special handler of a function, remembered."""
    registry = default_registry()
    handler = handler_of(func)
    if handler is not None:
        _rules[func] = handler
        return handler
    if func in _named:
        op_name, gradients = _named[func]
        rule = _rules[func] = _rule(func, get_distributed_op(op_name), op_name)
        rule.grad_placements = gradients
        return rule
    op, binding = registry.find(func), aten_binding(func)
    if binding is not None and op is registry.find(binding) and (op is not None or handler_of(binding) is not None):
        _rules[func] = _of_binding(func, binding)
        return _rules[func]
    if op is None:
        raise MissingOpError(registry.missing_message(func), func=func)
    if isinstance(op, FunctionOp):
        _rules[func] = _of_function(op)
    else:
        rule = _rule(func, op, getattr(func, "__name__", None) or str(func))
        in_place_view = rule.inplace and getattr(op, "makes_views", False) and not rule.name.startswith("__")
        _rules[func] = _of_view(rule.name.removesuffix("_")) if in_place_view else rule
    return _rules[func]


def _rule(func: Callable[..., Any], op: DistributedOp, name: str) -> DispatchEntry:
    return (DispatchEntry if isinstance(op, LayoutOp) else ThreePhaseEntry)(func, op, name)


def _of_binding(func: Any, binding: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of an operator of ``torch.ops.aten``: the function that it is in PyTorch's Python layer."""
    overload = func if hasattr(func, "_schema") else getattr(func, func.overloads()[0])
    # The one default in which they differ: there a loss that is not told how to reduce does not.
    arguments = overload._schema.arguments
    defaults = {a.name: (at, a.default_value) for at, a in enumerate(arguments) if a.name == "reduction"}

    def run(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        missing = {name: value for name, (at, value) in defaults.items() if len(args) <= at}
        return dispatch(binding, args, missing | kwargs)

    return run


def _of_view(name: str) -> Callable[..., Any]:
    """The handler of ``unsqueeze_`` and its like: the tensor becomes its own view."""
    view_of = getattr(torch.Tensor, name)

    def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return become_view(args[0], dispatch(view_of, args, kwargs), func.__name__)

    return run


def _of_function(op: FunctionOp) -> Callable[..., Any]:
    def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if state.mode.skip:
            return on_locals(func, args, kwargs)
        if "out" in kwargs and not op.writes_out:
            return into_out(func, args, kwargs)
        return op.run(func, args, kwargs)

    return run


def register_function(func: Callable[..., Any], op_name: str, grad_placements: Any = None) -> Callable[..., Any]:
    """Serve a function of local tensors by the op registered under a name; returns the key for :func:`dispatch`."""
    _named[func] = (op_name, grad_placements)
    return func


_named: dict[Any, tuple[str, Any]] = {}


def known_rule(func: Callable[..., Any]) -> DispatchEntry | None:
    """The rule that has served ``func``, with its cache; None when it was not called or needs none."""
    rule = _rules.get(func)
    return rule if isinstance(rule, DispatchEntry) else None


def cached_plans() -> int:
    """Number of plans in all caches."""
    return sum(len(rule.cache) for rule in _rules.values() if isinstance(rule, DispatchEntry))


def forget_rules() -> None:
    """Drop what was remembered; the registry calls this when its contents change."""
    _rules.clear()


LISTENERS.append(forget_rules)


def into_out(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The ``out=`` form: compute, then write into the given DTensors, whose layout stays."""
    out = kwargs["out"]
    given = {name: value for name, value in kwargs.items() if name != "out"}
    if out is None:
        return dispatch(func, args, given)
    if not any(isinstance(t, DTensor) for t in tensors_of((list(args), given))):
        raise TypeError(
            f"{func.__name__}: out= is a DTensor and no input is one; make the inputs DTensors (distribute_tensor), or "
            "copy_() the result into it"
        )
    if _grad_enabled() and any(t.requires_grad for t in tensors_of((args, kwargs))):
        # As PyTorch says it.
        raise RuntimeError(
            "functions with out=... arguments don't support automatic differentiation, but one of the arguments "
            "requires grad."
        )
    result = dispatch(func, args, given)
    many = isinstance(out, (tuple, list))
    for target, value in zip(out if many else (out,), result if many else (result,), strict=True):
        if not isinstance(target, DTensor):
            raise TypeError("out= must be a DTensor when an input is one")
        if target.shape != value.shape:
            raise ValueError(
                f"out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}; a DTensor is not resized"
            )
        if value.layout is not target.layout:
            if state.mode.policy != "auto" and not value.layout.is_partial():
                raise ValueError(
                    f"out= is laid out as {target.layout}, the result as {value.layout}; redistribute one of them"
                )
            value = value.redistribute(target.layout)
        before_write(target)
        target._resolve().copy_(value._resolve())
    return out


def _into_plain(rule: DispatchEntry, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An in-place operator on a plain tensor: right only while the result is equal on all ranks, gradient included."""
    target = args[0]
    new_args, new_kwargs = lifted(rule.name, rule.op, args, kwargs)
    before = new_args[0]._spec
    dispatch(rule.func, new_args, new_kwargs)
    if new_args[0]._spec is not before:
        raise TypeError(
            f"{rule.name}: an in-place operator on a plain tensor with a DTensor that is sharded, pending or varying; "
            "the plain tensor cannot hold the result. Make the target a DTensor"
        )
    return target
