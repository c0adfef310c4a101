"""Change a DTensor's layout, with a backward that is the exact dual.

A forward transition A -> B on values has the backward dual(B) -> dual(A) on gradients
(:func:`hyper_parallel.spec.dual`),
itself such a transition, so second derivatives are right. One autograd function covers all pairs: all-gather against
slice or reduce-scatter, all-reduce against identity or all-reduce, all-to-all against all-to-all, and so on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch

from hyper_parallel import comm_trace
from hyper_parallel.errors import RedistributionError
from hyper_parallel.layout import Layout
from hyper_parallel.placements import Partial, Placement, Replicate, is_partial, is_replicate, is_shard, short
from hyper_parallel.spec import Spec, contiguous_stride, dual, make_spec
from hyper_parallel.steps import Cast, Pending
from hyper_parallel.transition import plan_transition

Typed = tuple[Layout, frozenset[int]]


class _Transition(torch.autograd.Function):
    """Local tensor in one typed layout -> local tensor in another."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, src: Typed, dst: Typed, shape: tuple[int, ...], how: _How
    ) -> torch.Tensor:
        ctx.args = (src, dst, shape, how)
        ctx.where = comm_trace.user_line() if comm_trace._active else None
        if how.value is not None:
            return how.value.view_as(how.value)
        return how.move(local, src[0], dst[0], shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        src, dst, shape, how = ctx.args
        given, wanted = dual(*dst), dual(*src)
        if comm_trace._active:
            with _described(given[0], wanted[0], ctx.where, "backward"):
                back = _run(grad, given, wanted, shape, how.reverse(), torch.is_grad_enabled())
        else:
            back = _run(grad, given, wanted, shape, how.reverse(), torch.is_grad_enabled())
        return back, None, None, None, None


# Function.apply's own checks are for functorch transforms, which do not reach local tensors.
_apply_transition = super(torch.autograd.Function, _Transition).apply


class _How:
    """How a transition is carried out: dtypes on the wire, at once or in flight, or with a known value."""

    __slots__ = ("backward_dtype", "forward_dtype", "pending", "value", "want_pending")

    def __init__(
        self,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        want_pending: bool = False,
        value: torch.Tensor | None = None,
    ) -> None:
        self.forward_dtype, self.backward_dtype = forward_dtype, backward_dtype
        self.want_pending, self.value = want_pending, value
        self.pending: Pending | None = None

    def reverse(self) -> _How:
        return PLAIN if self.backward_dtype is None else _How(self.backward_dtype, self.forward_dtype)

    def move(self, local: torch.Tensor, src: Layout, dst: Layout, shape: tuple[int, ...]) -> torch.Tensor:
        plan = plan_transition(src, dst, shape)
        if not plan.steps:
            return local.view_as(local)
        if self.forward_dtype is None and not self.want_pending:
            return plan.run(local)
        sent = local if self.forward_dtype is None else local.to(self.forward_dtype)
        if not self.want_pending:
            return plan.run(sent).to(local.dtype)
        result = plan.start(sent)
        if isinstance(result, torch.Tensor):
            return result.to(local.dtype)
        self.pending = result if sent.dtype is local.dtype else Cast(result, local.dtype)
        return self.pending.out


PLAIN = _How()


def _described(src: Layout, dst: Layout, where: str | None, phase: str) -> AbstractContextManager[None]:
    return comm_trace.described(f"{describe(src)} -> {describe(dst)}", where, phase)


def describe(layout: Layout) -> str:
    """Placements as one word, e.g. ``S(0),R``."""
    return ",".join(short(p) for p in layout.placements)


def transition(local: torch.Tensor, src: Typed, dst: Typed, shape: tuple[int, ...], how: _How = PLAIN) -> torch.Tensor:
    """A local tensor moved between typed layouts, differentiable when the tensor needs a gradient.

    Raises:
        RedistributionError: when a gradient would have to pass a pending max, min or product.
    """
    tracked = torch.is_grad_enabled() and local.requires_grad
    if tracked:
        if src[0].is_partial():
            local, src = _only_sums(local, src)
        if dst[0].is_partial():
            dst = (_require_sums(dst[0]), dst[1])
    if src[0] is dst[0] and (not tracked or src[1] == dst[1]):
        return local
    if comm_trace._active:
        with _described(src[0], dst[0], None, "forward"):
            return _run(local, src, dst, shape, how, tracked)
    return _run(local, src, dst, shape, how, tracked)


def _run(local: torch.Tensor, src: Typed, dst: Typed, shape: tuple[int, ...], how: _How, tracked: bool) -> torch.Tensor:
    if tracked:
        return _apply_transition(local, src, dst, shape, how)
    return how.move(local, src[0], dst[0], shape)


def _only_sums(local: torch.Tensor, src: Typed) -> tuple[torch.Tensor, Typed]:
    """The same value with every pending average written as a pending sum, the only one that carries gradients."""
    layout, varying = src
    scale, changes = 1, {}
    for axis, placement in enumerate(layout.placements):
        if is_partial(placement) and placement.reduce_op != "sum":
            if placement.reduce_op != "avg":
                raise RedistributionError(
                    f"a gradient cannot pass a pending {placement.reduce_op} (mesh axis "
                    f"{layout.mesh_dim_names[axis]!r}): "
                    "use the operator on a tensor that is not sharded along the reduced dimension, or detach() first"
                )
            scale *= layout.mesh_shape[axis]
            changes[axis] = Partial()
    if not changes:
        return local, src
    return local / scale, (layout.with_placements(changes), varying)


def _require_sums(layout: Layout) -> Layout:
    if all(not is_partial(p) or p.reduce_op == "sum" for p in layout.placements):
        return layout
    raise RedistributionError("a tensor that needs a gradient can only become Partial('sum'); detach() it first")


@lru_cache(maxsize=8192)
def target_spec(spec: Spec, layout: Layout, varying: frozenset[int] | None = None) -> Spec:
    """The spec after redistribution to ``layout``; an axis stays varying while it stays Replicate unless told."""
    if varying is None:
        varying = frozenset(a for a in spec.varying if is_replicate(layout.placements[a]))
    if layout is spec.layout and varying == spec.varying:
        return spec
    moved = plan_transition(spec.layout, layout, spec.shape).steps
    stride = contiguous_stride(spec.shape) if moved else spec.stride
    return make_spec(layout, spec.shape, stride, spec.dtype, varying)


def varying_axes(layout: Layout, grad_placements: Any) -> frozenset[int]:
    """Axes of ``layout`` whose gradient placement is Partial while the value is Replicate."""
    return frozenset(
        a
        for a, (p, g) in enumerate(zip(layout.placements, grad_placements, strict=True))
        if is_replicate(p) and is_partial(g)
    )


def gradient_layout(layout: Layout, varying: frozenset[int], grad_placements: Any) -> tuple[Layout, frozenset[int]]:
    """The typed layout of a gradient that the user describes by ``grad_placements``, one per mesh axis.

    Raises:
        ValueError: when their number is not the mesh's, or one cannot describe a gradient of this layout.
    """
    natural, duals = dual(layout, varying)
    if grad_placements is None:
        return natural, duals
    given: tuple[Placement, ...] = tuple(grad_placements)
    if len(given) != len(layout.placements):
        raise ValueError(f"{len(given)} grad_placements {given} for a mesh of {len(layout.placements)} axes")
    wanted = natural.with_placements(
        dict(enumerate(Layout.from_placements(layout.mesh, given, ndim=layout.ndim).placements))
    )
    for name, held, grad in zip(layout.mesh_dim_names, layout.placements, wanted.placements, strict=True):
        if grad != held if is_shard(held) else grad not in (Replicate(), Partial()):
            allowed = repr(held) if is_shard(held) else "Replicate() or Partial()"
            raise ValueError(
                f"grad_placements on mesh axis {name!r}: the gradient of a local tensor with {held!r} has its shape "
                "and is "
                f"{allowed}, not {grad!r}"
            )
    return wanted, frozenset(a for a in duals if is_replicate(wanted.placements[a]))
