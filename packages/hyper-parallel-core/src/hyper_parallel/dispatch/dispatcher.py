"""The dispatcher: from a torch function on DTensors to the local call.

A warm call is one dictionary lookup: the key holds the specs of the DTensors (by identity), which of them need a
gradient, and the other arguments. What it finds is a :class:`~hyper_parallel.dispatch.plan.Plan`: the function to run
on the local tensors and the specs of what comes out. Where none is ready, the arguments are rewritten and looked up
again (:class:`~hyper_parallel.dispatch.rewriting.Rewriting`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hyper_parallel.context import Mode, state
from hyper_parallel.dispatch import check_results
from hyper_parallel.dispatch.arguments import on_locals
from hyper_parallel.dispatch.cache_key import scan
from hyper_parallel.dispatch.entry import DispatchEntry, is_asked
from hyper_parallel.dispatch.find_rule import rule_of
from hyper_parallel.dispatch.in_place import into_plain, run_inplace
from hyper_parallel.dispatch.out_argument import into_out
from hyper_parallel.dispatch.plan import Plan, finish, wrap_many
from hyper_parallel.dispatch.rewriting import Rewriting
from hyper_parallel.registry.registry import LISTENERS
from hyper_parallel.tensor.autograd_bridge import Marks
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import before_write
from hyper_parallel.tensor.untraced import untraced
from hyper_parallel.tensor.views import assign, note_copies, note_view
from hyper_parallel.tensor.wrapper import new_wrapper
from hyper_parallel.torch_compat import refuse_memory
from hyper_parallel.utils.function_names import name_of_served

__all__ = ["dispatch", "forget_rules", "known_rule", "plans_made"]

_grad_enabled = torch.is_grad_enabled
_SETITEM = torch.Tensor.__setitem__
_rules: dict[Any, Any] = {}


def dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Run ``func`` on arguments that contain DTensors."""
    return torch_function(DTensor, func, (), args, kwargs)


def torch_function(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """``DTensor.__torch_function__``: what needs no plan goes its own way."""
    rule: Any = _rules.get(func)
    if rule.__class__ is not DispatchEntry:
        if rule is None:
            rule = _rules[func] = rule_of(func)
        if rule.__class__ is not DispatchEntry:
            return rule(func, args, kwargs or {})
    mode = state.mode
    if mode.skip:
        return on_locals(func, args, kwargs or {})
    if rule.inplace and isinstance(args[0], torch.Tensor):
        if args[0].__class__ is not DTensor:
            return into_plain(rule, args, kwargs or {})
        if func is _SETITEM and isinstance(args[2], DTensor) and args[2]._copied_by is not None:
            target, index, value = args
            return assign(target, index, value, partial(_call, rule, mode, args, kwargs))
    if kwargs and "out" in kwargs and name_of_served(func) is None:
        return into_out(func, args, kwargs)
    return _call(rule, mode, args, kwargs)


def _call(rule: DispatchEntry, mode: Mode, args: Sequence[Any], kwargs: Any) -> Any:
    """Rewrite the arguments until a plan fits them, run it on the local tensors, and wrap what comes out."""
    grad = _grad_enabled()
    rewriting: Rewriting | None = None
    while True:
        key: list[Any] = [grad, mode, rewriting is None or rewriting.before is None]
        local_args: list[Any] = []
        local_kwargs = kwargs
        loose = scan(args, key, local_args, grad, rule.by_value)
        if kwargs and not loose:
            values: list[Any] = []
            key.extend(kwargs)
            loose = scan(kwargs.values(), key, values, grad, rule.by_value)
            local_kwargs = dict(zip(kwargs, values, strict=False))
        lookup = None if loose else tuple(key)
        plan = rule.cache.get(lookup)
        if plan is not None and plan.ready:
            break
        rewriting = rewriting or Rewriting(rule, args, kwargs)
        plan = rewriting.step(plan, lookup, local_args, local_kwargs)
        args, kwargs = rewriting.args, rewriting.kwargs
        if plan is not None:
            break
        if rewriting.result is not None:
            return rewriting.result
    if rewriting is not None and rewriting.before is not None:
        rewriting.found(plan)
    if plan.inplace:
        return run_inplace(plan, args, local_args, local_kwargs or {})
    if rule.flag_at is not None and is_asked(args, kwargs or {}, rule.flag_at):
        before_write(args[0], counted=True)
    out = plan.call(*local_args, **local_kwargs) if local_kwargs else plan.call(*local_args)
    result = _wrapped(plan, out, args, local_args, grad)
    if plan.is_view and not (args and result is args[0]):
        _note_views(plan, result, args, kwargs, rewriting)
    return result


def _wrapped(plan: Plan, out: Any, args: Sequence[Any], local_args: list[Any], grad: bool) -> Any:
    """The local result as DTensors."""
    if plan.is_new:
        if out is NotImplemented:  # x == None: Python asks the other operand
            return out
        out = finish(plan, out)
    spec = plan.spec
    if spec is None:
        return wrap_many(out, plan.specs)
    if local_args and out is local_args[0] and isinstance(args[0], DTensor) and spec is args[0]._spec:
        return args[0]  # a cast or copy that was none, as in PyTorch; or inplace=True
    if out.dtype is not spec.dtype:  # autocast chose another dtype
        spec = spec.replace(dtype=out.dtype)
    result = new_wrapper(DTensor, out, spec, out.requires_grad)
    refuse_memory(result)
    result._pending = None if grad else Marks.now
    return result


def _note_views(plan: Plan, result: Any, args: Sequence[Any], kwargs: Any, rewriting: Rewriting | None) -> None:
    """That results are views of the first argument as the user gave it, or copies in the place of views."""
    views = result if plan.spec is None else (result,)
    source = rewriting.source if rewriting is not None else args[0] if args else None
    if plan.copies or (rewriting is not None and rewriting.copied):
        write = plan.carry_write
        given = (source, *args[1:]), kwargs or {}
        note_copies(views, source, plan.name, None if write is None else partial(write, *given))
        return
    for view in views:
        note_view(view, source)


DTensor.__torch_function__ = classmethod(untraced(torch_function))  # type: ignore[assignment]
check_results.for_the_whole_program()


# -- the rules found so far ---------------------------------------------------------------------------------------


def known_rule(func: Callable[..., Any]) -> DispatchEntry | None:
    """The rule that has served ``func``, with its cache; None when it was not called or needs none."""
    rule = _rules.get(func)
    return rule if isinstance(rule, DispatchEntry) else None


def plans_made() -> int:
    """Number of plans made since the rules were last forgotten: a warm call makes none."""
    return sum(rule.plans.made for rule in _rules.values() if isinstance(rule, DispatchEntry))


def forget_rules() -> None:
    """Drop what was remembered; the registry calls this when its contents change."""
    _rules.clear()


LISTENERS.append(forget_rules)
