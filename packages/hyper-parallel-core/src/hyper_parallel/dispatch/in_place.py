"""Operators that write their first argument, and the other ways to write where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.context import state
from hyper_parallel.dispatch.arguments import lifted
from hyper_parallel.dispatch.entry import DispatchEntry
from hyper_parallel.dispatch.plan import Plan, finish
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import is_partial, is_replicate
from hyper_parallel.tensor import autograd_bridge
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import before_write, flag_varying
from hyper_parallel.tensor.views import carry, root_of
from hyper_parallel.utils.structures import tensors_of


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


def into_plain(rule: DispatchEntry, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An in-place operator on a plain tensor: right only while the result is equal on all ranks, gradient included.

    Where it may not be, it is tried on a copy: an operator such as ``+=`` that raises TypeError is called again out of
    place by Python, which has to find the target as it was.
    """
    target = args[0]
    risky = any(_may_differ(t) for t in tensors_of((args[1:], kwargs)) if isinstance(t, DTensor))
    written = target.clone() if risky else target
    new_args, new_kwargs = lifted(rule.name, rule.op, (written, *args[1:]), kwargs)
    before = new_args[0]._spec
    DTensor.__torch_function__(rule.func, (), new_args, new_kwargs)
    if new_args[0]._spec is not before:
        raise TypeError(
            f"{rule.name}: an in-place operator on a plain tensor with a DTensor that is sharded, pending or varying; "
            "the plain tensor cannot hold the result. Make the target a DTensor"
        )
    return target.copy_(written) if risky else target


def _may_differ(tensor: DTensor) -> bool:
    """Whether ranks may hold other values of a tensor, or other terms of its gradient."""
    return bool(tensor._spec.varying) or not all(map(is_replicate, tensor.placements))


def write_as_terms(rule: DispatchEntry, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor | None:
    """An in-place operator whose pending target does not fit: the value is computed out of place and written as terms;
    None where that is neither possible nor allowed."""
    target = args[0]
    out_of_place = form_of(rule.name)
    if out_of_place is None or not holds_any_value(target.layout):
        return None
    value = DTensor.__torch_function__(out_of_place, (), args, kwargs)
    return write(target, value) if state.mode.policy == "auto" or fits_reduced(value, target) else None


def holds_any_value(layout: Layout) -> bool:
    """Whether something is pending in which every value can be written, as terms: no norm is negative."""
    kinds = {p.reduce_op for p in layout.placements if is_partial(p)}
    return bool(kinds) and kinds <= {"sum", "avg", "max", "min"}


def fits_reduced(value: DTensor, target: DTensor) -> bool:
    """Whether a value comes to the target's layout without other communication than that its own pending reductions
    are carried out."""
    have, want = value.layout, target.layout
    reduced = have.with_placements({a: want.placements[a] for a, p in enumerate(have.placements) if is_partial(p)})
    return not plan_transition(reduced, want, tuple(target.shape)).communicates


def write(target: DTensor, value: DTensor) -> DTensor:
    """``copy_`` from any layout. Neither memory nor placements of the target change: it may have views, and be one.

    Raises:
        RuntimeError: as PyTorch's in-place operators where the target's dtype cannot hold the result.
    """
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(
            f"result type {value.dtype} can't be cast to the desired output type {target.dtype}: an operator in place "
            "keeps the dtype of the tensor that it writes"
        )
    return target.copy_(value.redistribute(target.layout))  # type: ignore[return-value]


def write_back(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int) -> DTensor:
    """``inplace=True`` of a function whose first argument has to be redistributed: what is computed is copied back."""
    given = [*args]
    if len(given) > position:
        given[position] = False
    named = {name: value for name, value in kwargs.items() if name != "inplace"}
    return write(args[0], func(*given, **named))


def form_of(name: str) -> Callable[..., Any] | None:
    """The out-of-place form of an in-place operator: ``clamp`` of ``clamp_``, ``__mul__`` of ``__imul__``."""
    name = "__" + name[3:] if name.startswith("__i") else name.removesuffix("_")
    return getattr(torch.Tensor, name, None) or getattr(torch, name, None)
