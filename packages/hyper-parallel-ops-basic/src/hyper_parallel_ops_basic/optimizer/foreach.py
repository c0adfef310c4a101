"""Operators on lists of tensors: ``torch._foreach_*`` and the fused optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import DTensor, Layout, Partial
from hyper_parallel.errors import RedistributionError
from hyper_parallel.rules import (
    NOT_VARYING,
    FunctionOp,
    OpSummary,
    has_copies,
    is_partial,
    is_shard,
    local_of,
    make_spec,
    norm_op,
    plan_transition,
    remembered,
    state,
    wrap,
)


class Foreach(FunctionOp):
    """One operator on every element of some lists: position ``i`` of the lists is a call of its own.

    Each tensor of the first list keeps its layout, on whatever mesh; its partners take it. A pending gradient is
    reduced for that, a whole one sliced; anything else is an error, or a redistribution under ``auto``. The local
    tensors then go through the operator in one call. With gradients, for pending targets, and for writes that have to
    be carried to another tensor, the elements go through the single-tensor operator one by one.
    """

    summary = OpSummary(
        "every dim of each tensor; partners take its layout",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        anchors = next(a for a in args if isinstance(a, (list, tuple)))
        writes = func.__name__.endswith("_")
        if _needs_grad(args) or any(
            isinstance(t, DTensor) and (t.layout.is_partial() or (writes and has_copies(t))) for t in anchors
        ):
            return _one_by_one(func, args, kwargs)
        local_args = [_fitted(func, a, anchors) for a in args]
        if any(a is None for a in local_args):
            return _one_by_one(func, args, kwargs)
        out = func(*local_args, **{name: _whole(value) for name, value in kwargs.items()})
        if writes:
            return [*anchors]
        return type(out)(_like(o, t) for o, t in zip(out, anchors, strict=True))


class ForeachNorm(FunctionOp):
    """``_foreach_norm``: the norms stay pending, so that the norm of all of them costs one all-reduce."""

    summary = OpSummary(
        "every dim; leaves pending norms",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = args[0]
        order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
        pending = any(isinstance(t, DTensor) and t.layout.is_partial() for t in tensors)
        if pending or not 0 < order < math.inf or _needs_grad(args):
            dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
            return tuple(torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors)
        norms = func([_whole(t) for t in tensors], *args[1:], **kwargs)
        return tuple(_norm_of(t, norm, order) for t, norm in zip(tensors, norms, strict=True))


class FusedStep(FunctionOp):
    """``torch._fused_adam_`` and its like: parameters, gradients and states in lists, 0-dim step counts among them."""

    summary = OpSummary(
        "every dim of each parameter; gradients and states take its layout",
        pending="gradients are reduced first",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        lists = self.local_lists(func, args)
        func(*lists, **{name: _whole(value) for name, value in kwargs.items()})
        self.count_writes(args[2:], lists[2:])

    def local_lists(self, func: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """The local tensors of each list, laid out like the parameters, which are the first."""
        pending = [t.layout for t in args[0] if isinstance(t, DTensor) and t.layout.is_partial()]
        if pending:
            raise RedistributionError(
                f"{func.__name__}: a parameter cannot be a pending reduction; call reduce_partial() first",
                op_name=func.__name__,
                layouts=pending,
            )
        local_args = [_fitted(func, a, args[0]) for a in args]
        if any(a is None for a in local_args):
            raise TypeError(
                f"{func.__name__}: a parameter is a DTensor and its gradient or state a plain tensor, or the other way "
                "round; make the optimizer after the parameters were distributed"
            )
        return local_args

    def count_writes(self, states: Sequence[Any], local: Sequence[Any]) -> None:
        """Count the write to each state, as the kernel counts none: what was computed of a state before it is old now.

        Parameters are leaves, of which nothing is kept that such a write makes wrong, and a graph that holds one stays
        as usable as on one device.
        """
        torch.autograd.graph.increment_version(
            [t for given, tensors in zip(states, local, strict=True) for t in _written(given, tensors)]
        )


def _needs_grad(args: Sequence[Any]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(
        isinstance(t, torch.Tensor) and t.requires_grad
        for a in args
        for t in (a if isinstance(a, (list, tuple)) else (a,))
    )


def _written(given: Any, local: Any) -> list[torch.Tensor]:
    """The local tensors of a list of states that are DTensors."""
    return [t for t, state in zip(local, given, strict=True) if isinstance(state, DTensor) and not t.is_inference()]


def _whole(value: Any) -> Any:
    """The local tensor of a DTensor, with what is pending reduced."""
    return local_of(value.reduce_partial()) if isinstance(value, DTensor) else value


def _fitted(func: Callable[..., Any], values: Any, anchors: Sequence[Any]) -> Any:
    """The local tensors of one argument, laid out like the anchors; None when the pairs need more than that."""
    if not isinstance(values, (list, tuple)):
        return _whole(values)
    found = []
    for position, value in enumerate(values):
        if not isinstance(value, DTensor):
            if isinstance(value, torch.Tensor) and value.ndim and isinstance(anchors[position], DTensor):
                return None
            found.append(value)
            continue
        anchor = anchors[position]
        if value is not anchor and value.ndim:
            if not isinstance(anchor, DTensor) or anchor.shape != value.shape:
                return None
            if value.layout is not anchor.layout:
                value = _moved(func, value, anchor.layout)
        found.append(_whole(value))
    return found


def _moved(func: Callable[..., Any], value: DTensor, layout: Layout) -> DTensor:
    old = value.layout
    if old.info is layout.info:
        reduced = old.with_placements({a: layout.placements[a] for a, p in enumerate(old.placements) if is_partial(p)})
        free = not plan_transition(reduced, layout, tuple(value.shape)).communicates
        allowed = free and (reduced is old or state.mode.policy != "strict")
        if allowed or state.mode.policy == "auto":
            return remembered(value, layout)
    raise RedistributionError(
        f"{func.__name__}: a tensor of shape {tuple(value.shape)} is laid out as {old}, its partner in the first "
        f"list as {layout}\n  fix: redistribute one of them, or use redistribute_policy('auto')",
        op_name=func.__name__,
        layouts=[old, layout],
    )


def _like(out: torch.Tensor, anchor: Any) -> Any:
    if not isinstance(anchor, DTensor):
        return out
    return wrap(out, anchor.spec.replace(dtype=out.dtype, varying=NOT_VARYING))


def _norm_of(tensor: Any, norm: torch.Tensor, order: float) -> Any:
    if not isinstance(tensor, DTensor):
        return norm
    layout = tensor.layout
    pending = {a: Partial(norm_op(order)) for a, p in enumerate(layout.placements) if is_shard(p)}
    return wrap(norm, make_spec(layout.replicated(0).with_placements(pending), (), (), norm.dtype))


def _one_by_one(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The single-tensor operator on every position of the lists."""
    name = func.__name__.removeprefix("_foreach_")
    inplace = name.endswith("_")
    count = len(next(a for a in args if isinstance(a, (list, tuple))))
    single = getattr(torch.Tensor if isinstance(args[0], (list, tuple)) else torch, name, None)
    named = [kwargs] * count
    if name.rstrip("_") in ("addcmul", "addcdiv"):
        args, named = args[:3], [{"value": factor} for factor in _factors(args[3:], kwargs, count)]
    results = []
    for position in range(count):
        given = [a[position] if isinstance(a, (list, tuple)) else a for a in args]
        if single is not None:
            results.append(single(*given, **named[position]))
        else:  # maximum_ and the like have no method
            given[0].copy_(getattr(torch, name[:-1])(*given, **named[position]))
    return [*args[0]] if inplace else tuple(results)


def _factors(positional: Sequence[Any], kwargs: dict[str, Any], count: int) -> list[Any]:
    """By what each product of ``addcmul`` counts: one number for all, a list of numbers, or a tensor of them."""
    (given,) = [*positional, *kwargs.values()] or [1]
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    return list(given) if isinstance(given, (list, tuple)) else [given] * count
