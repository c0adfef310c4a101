"""What happens to a DTensor that is written: it keeps its identity, and may turn varying, reduced or its own view."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.comm.redistribute import transition
from hyper_parallel.sharding.placements import Replicate, is_partial
from hyper_parallel.sharding.spec import dual
from hyper_parallel.tensor import autograd_bridge
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.views import refuse_lost_write, root_of


def become_view(target: DTensor, view: DTensor, name: str) -> DTensor:
    """Give a tensor the shape and layout of a view of it; the Python object and its memory stay.

    Raises:
        RuntimeError: for a leaf that requires a gradient, as in PyTorch, or where the view would be a copy.
    """
    if torch.is_grad_enabled() and target._local.is_leaf and target._local.requires_grad:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if view._copied_by is not None:
        raise RuntimeError(
            f"{name}: {target.layout} would have to be redistributed, so that the result is no view of the tensor: "
            f"use x = x.{name.removesuffix('_')}(...)"
        )
    if view is target:
        return target
    before_write(target)
    target.forget_forms()
    autograd_bridge.renew_wrapper(target, view._spec, view._local.device, view.requires_grad)
    target._local, target._spec, target._origin = view._local, view._spec, None
    return target


def reduce_in_place(target: DTensor) -> bool:
    """Carry out, in place, a pending max, min, product or norm; False where that is not possible.

    They are pending because that was cheaper than to reduce at once, not because somebody laid the tensor out so: a
    function that writes the tensor and needs its value finds it reduced.
    """
    kinds = {p.reduce_op for p in target._spec.layout.placements if is_partial(p)}
    is_shared = target._base_dtensor is not None or any(view() is not None for view in target._views)
    if not kinds or kinds & {"sum", "avg"} or is_shared:
        return False
    carry_out(target)
    return True


def carry_out(target: DTensor) -> None:
    """Carry out the pending reductions of a tensor without history, which gets memory of its own."""
    layout = target._spec.layout
    whole = layout.with_placements({a: Replicate() for a, p in enumerate(layout.placements) if is_partial(p)})
    with torch.no_grad():
        local = target._resolve().detach()
        target._local = plan_transition(layout, whole, tuple(target._spec.shape)).run(local)
    target._spec = target._spec.replace(layout=whole)
    target._base_dtensor = None
    target.forget_forms()


def before_write(target: DTensor, carried: bool = False, counted: bool = False) -> None:
    """What comes before every in-place write to a DTensor.

    Args:
        carried: whether what is written to a redistributed copy is carried to the tensor that it shows.
        counted: whether the function counts the write on every rank, if it writes at all (dropout without training).

    Raises:
        RuntimeError: the target is a redistributed copy where PyTorch would have a view, so the write would be lost.
    """
    root = root_of(target)
    refuse_lost_write(root, carried)
    if root._tracked is not None:  # a write through .data, which the version counter does not see
        root._tracked.forget_forms()
    local = target._resolve()
    if not counted and not local.is_inference():
        # Also on ranks that hold nothing of what is written: whether a remembered form is current is decided by the
        # version, and must be decided alike.
        torch.autograd.graph.increment_version(local)
    autograd_bridge.before_write(target)
    if root is not target:
        autograd_bridge.before_write(root)


def flag_varying(target: DTensor, varying: frozenset[int]) -> None:
    """Views share one local gradient graph, so the whole family turns varying."""
    root = root_of(target)
    family = [root, *(view for ref in root._views if (view := ref()) is not None)]
    for tensor in family:
        tensor._spec = tensor._spec.replace(varying=tensor._spec.varying | varying)


class _VaryInPlace(torch.autograd.Function):
    """A local tensor turns varying where it is; views of it follow."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, old: Any, new: Any, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.args = (old, new, shape)
        ctx.mark_dirty(local)
        return local

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        old, new, shape = ctx.args
        return transition(grad, dual(*new), dual(*old), shape), None, None, None


def vary_in_place(target: DTensor, varying: frozenset[int]) -> DTensor:
    """Turn the target of an in-place operator (and the tensor it is a view of) varying."""
    root = root_of(target)
    old = root._spec
    if root._resolve().requires_grad:
        layout = old.layout
        _VaryInPlace.apply(root._local, (layout, old.varying), (layout, old.varying | varying), tuple(old.shape))
    flag_varying(target, varying)
    return target
