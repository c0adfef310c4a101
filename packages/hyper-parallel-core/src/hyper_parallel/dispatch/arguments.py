"""The arguments of a call: their local forms, the call as rules see it, and plain tensors that meet DTensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel._rules.call import Call, Ref
from hyper_parallel._rules.op import DistributedOp
from hyper_parallel._rules.strategy import LayoutOp
from hyper_parallel.context import in_backward, state
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.spec import Spec, make_spec
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.utils.structures import map_tensors, tensors_of

if TYPE_CHECKING:
    from hyper_parallel.dispatch.entry import DispatchEntry


def local_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with local tensors in the place of DTensors."""
    return map_arguments(args, kwargs, lambda tensor: tensor._resolve())


def on_locals(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function on the local tensors, which the user so gets: the result may be a view of one, or one itself."""
    local_args, local_kwargs = map_arguments(args, kwargs, lambda tensor: tensor.to_local())
    return func(*local_args, **local_kwargs)


def map_arguments(
    args: Sequence[Any], kwargs: dict[str, Any], change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``change`` applied to every DTensor."""

    def apply(tensor: torch.Tensor) -> Any:
        return change(tensor) if isinstance(tensor, DTensor) else tensor

    return tuple(map_tensors(a, apply) for a in args), {k: map_tensors(v, apply) for k, v in kwargs.items()}


def with_value(args: Sequence[Any], kwargs: dict[str, Any], index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with what the tensor at ``index`` holds in its place: a number, or a list of them."""
    places = itertools.count()

    def read(tensor: torch.Tensor) -> Any:
        return tensor.tolist() if next(places) == index else tensor

    return tuple(map_tensors(a, read) for a in args), {k: map_tensors(v, read) for k, v in kwargs.items()}


# -- the call as rules see it ------------------------------------------------------------------------------------


def make_call(op: DistributedOp, rule: DispatchEntry | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call as rules see it."""
    inputs: list[Spec] = []
    needs_grad: list[bool] = []
    grad = torch.is_grad_enabled()

    # Not a function that calls itself: that is a reference cycle, which would keep the arguments alive.
    def note(tensor: torch.Tensor) -> Ref:
        if isinstance(tensor, DTensor):
            spec, local = tensor._spec, tensor._resolve()
        else:
            spec, local = replica_spec(tensor, first_dtensor(args, kwargs).layout), tensor
        inputs.append(spec)
        needs_grad.append(grad and local.requires_grad)
        return Ref(len(inputs) - 1, spec)

    seen_args = tuple(map_tensors(a, note) for a in args)
    seen_kwargs = {name: map_tensors(value, note) for name, value in kwargs.items()}
    func = rule.func if rule else getattr(torch, op.op_name, None)
    return Call(
        func,  # type: ignore[arg-type]
        rule.name if rule else op.op_name,
        seen_args,
        seen_kwargs,
        inputs,
        needs_grad,
        state.mode,
        op.arguments if isinstance(op, LayoutOp) and op.signature is not None else None,
        bool(rule and rule.inplace),
    )


def make_call_of(tensors: Sequence[DTensor]) -> Call:
    """A call of no operator in particular on these tensors."""
    grad = torch.is_grad_enabled()
    specs = [t._spec for t in tensors]
    needs_grad = [grad and t._resolve().requires_grad for t in tensors]
    return Call(torch.clone, "custom_shard", (), {}, specs, needs_grad, state.mode, None, False)


# -- plain tensors ------------------------------------------------------------------------------------------------


def first_dtensor(args: Any, kwargs: dict[str, Any]) -> DTensor:
    """The DTensor whose mesh plain tensors join."""
    return next(t for t in tensors_of((list(args), kwargs)) if isinstance(t, DTensor))


def counts_as_replica(tensor: torch.Tensor, grad: bool) -> bool:
    """Whether a plain tensor may meet DTensors: a number (0-dim, no gradient), any inside implicit_replication, and any
    in the backward.

    The backward runs parts of a model's forward again (activation checkpointing) and the backward of functions that
    saved plain tensors, outside of the contexts in which they met in the forward.
    """
    if state.mode.replicate_plain or in_backward():
        return True
    return tensor.ndim == 0 and not (grad and tensor.requires_grad)


def replica_spec(tensor: torch.Tensor, layout: Layout) -> Spec:
    """The spec of a plain tensor that is the same on all ranks of a mesh."""
    return make_spec(layout.replicated(tensor.ndim), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def lifted(name: str, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments with plain tensors as Replicate DTensors.

    Raises:
        RuntimeError: for a plain tensor that does not count as one; arguments read only for shape, dtype or device
            always do.
    """
    near = first_dtensor(args, kwargs)
    grad = torch.is_grad_enabled()
    unread = getattr(op, "uncounted", ())

    def lift(tensor: torch.Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        if not counts_as_replica(tensor, grad):
            # No TypeError: Python would take it for "try the other operand's method".
            raise RuntimeError(
                f"{name}: a plain tensor of shape {tuple(tensor.shape)} is mixed with a DTensor of shape "
                f"{tuple(near.shape)}, {near.layout}. Say how it is laid out: distribute_tensor(tensor, mesh, "
                "placements) or DTensor.from_local(...); or, when every rank holds the same values, run inside "
                "`with hyper_parallel.implicit_replication():`"
            )
        return replica(tensor)

    def replica(tensor: torch.Tensor) -> DTensor:
        return tensor if isinstance(tensor, DTensor) else wrap(tensor, replica_spec(tensor, near.layout))

    new_args = tuple(map_tensors(a, replica if i in unread else lift) for i, a in enumerate(args))
    return new_args, {key: map_tensors(value, lift) for key, value in kwargs.items()}
