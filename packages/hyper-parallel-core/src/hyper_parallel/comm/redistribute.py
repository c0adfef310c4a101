"""Change a DTensor's layout, with a backward that is the exact dual.

A forward transition A -> B on values has the backward dual(B) -> dual(A) on gradients
(:func:`hyper_parallel.sharding.spec.dual`), itself such a transition, so second derivatives are right. One autograd
function covers all pairs: all-gather against slice or reduce-scatter, all-reduce against identity or all-reduce,
all-to-all against all-to-all, and so on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from hyper_parallel.comm import trace as comm_trace
from hyper_parallel.comm.planner import TransitionPlan, plan_transition
from hyper_parallel.comm.steps import CastResult, Pending
from hyper_parallel.errors import RedistributionError
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial, Placement, Replicate, is_partial, is_replicate, is_shard, short
from hyper_parallel.sharding.spec import Spec, dual, inverse, make_spec

Typed = tuple[Layout, frozenset[int]]


class Redistribution:
    """What brings local tensors of one global shape from one typed layout to another.

    Attributes:
        order: of the dims in memory, which the result has as well (see :attr:`.Spec.memory_order`).
        plan: for tensors whose dims are counted in that order, so that nothing has to be copied to be sent.
    """

    __slots__ = ("_back", "dst", "only_sums", "order", "plan", "shape", "src")

    def __init__(self, src: Typed, dst: Typed, shape: tuple[int, ...], order: tuple[int, ...] | None) -> None:
        self.src, self.dst, self.shape, self.order = src, dst, shape, order
        if order is None:
            self.plan = plan_transition(src[0], dst[0], shape)
        else:
            before, after = (typed[0].move_dims(inverse(order), len(order)) for typed in (src, dst))
            self.plan = plan_transition(before, after, tuple(shape[d] for d in order))
        self.only_sums = not _other_reductions(src[0]) and not _other_reductions(dst[0])
        self._back: Redistribution | None = None

    @property
    def back(self) -> Redistribution:
        """The way of the gradient."""
        if self._back is None:
            self._back = move_of(dual(*self.dst), dual(*self.src), self.shape, self.order)
        return self._back


@lru_cache(maxsize=8192)
def move_of(src: Typed, dst: Typed, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> Redistribution:
    """The move between these, made once."""
    return Redistribution(src, dst, shape, order)


class _Transition(torch.autograd.Function):
    """A move with its gradient."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, move: Redistribution, how: How) -> torch.Tensor:
        # Not ``how`` itself: what is in flight holds the result, whose graph this is, and nobody could free the two.
        ctx.move, ctx.how_back = move, how.reverse()
        ctx.where = comm_trace.user_line() if comm_trace._active else None
        if how.value is not None:
            return how.value.view_as(how.value)
        return how.run(local, move.plan)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        move, how = ctx.move.back, ctx.how_back
        if comm_trace._active:
            with _described(move, ctx.where, "backward"):
                return _in_order(grad, move, how, torch.is_grad_enabled()), None, None
        return _in_order(grad, move, how, torch.is_grad_enabled()), None, None


# Function.apply's own checks are for functorch transforms, which do not reach local tensors.
_apply_transition = super(torch.autograd.Function, _Transition).apply


class Dtypes(NamedTuple):
    """In which dtypes a tensor is moved, and its gradient."""

    source: torch.dtype
    """Of the tensor."""
    moved: torch.dtype
    """What the tensor is cast to, whether or not something is sent."""
    result: torch.dtype
    backward: torch.dtype
    """What a gradient is cast to before it is moved back; it arrives in that of the tensor."""
    wire: torch.dtype | None = None
    """In place of ``moved`` where something is sent."""

    @classmethod
    def given(
        cls,
        source: torch.dtype,
        forward: torch.dtype | None,
        backward: torch.dtype | None,
        wire: torch.dtype | None,
    ) -> Dtypes | None:
        """What the arguments of ``DTensor.redistribute`` mean; None where they change nothing."""
        forward, backward = forward or source, backward or source
        return (
            None if forward == backward == (wire or source) == source else cls(source, forward, forward, backward, wire)
        )

    def in_transit(self, plan: TransitionPlan) -> torch.dtype:
        """What the tensor is cast to before the steps of ``plan``."""
        return self.wire if self.wire and any(step.collective for step in plan.steps) else self.moved

    def reverse(self) -> Dtypes:
        """Of the gradient."""
        return Dtypes(self.result, self.backward, self.source, self.backward)


class How:
    """How a transition is carried out: in other dtypes, at once or in flight, or with a known value."""

    __slots__ = ("dtypes", "pending", "value", "want_pending")

    def __init__(
        self, dtypes: Dtypes | None = None, want_pending: bool = False, value: torch.Tensor | None = None
    ) -> None:
        self.dtypes, self.want_pending, self.value = dtypes, want_pending, value
        self.pending: Pending | None = None

    def reverse(self) -> How:
        return PLAIN if self.dtypes is None else How(self.dtypes.reverse())

    def run(self, local: torch.Tensor, plan: TransitionPlan) -> torch.Tensor:
        sent, result_dtype = local, local.dtype
        if self.dtypes is not None:
            sent, result_dtype = local.to(self.dtypes.in_transit(plan)), self.dtypes.result
        if not plan.steps:
            result = sent.to(result_dtype)
            return local.view_as(local) if result is local else result
        if not self.want_pending:
            return plan.run(sent).to(result_dtype)
        started = plan.start(sent)
        if isinstance(started, torch.Tensor):
            return started.to(result_dtype)
        self.pending = started if sent.dtype is result_dtype else CastResult(started, result_dtype)
        return self.pending.out


PLAIN = How()


def _described(move: Redistribution, where: str | None, phase: str) -> AbstractContextManager[None]:
    src, dst = move.src[0], move.dst[0]
    return comm_trace.described(f"{describe(src)} -> {describe(dst)}", where, phase, src.mesh_dim_names)


def describe(layout: Layout) -> str:
    """Placements as one word, e.g. ``S(0),R``."""
    return ",".join(short(p) for p in layout.placements)


def transition(local: torch.Tensor, src: Typed, dst: Typed, shape: tuple[int, ...], how: How = PLAIN) -> torch.Tensor:
    """A local tensor moved between typed layouts, differentiable when the tensor needs a gradient.

    Raises:
        RedistributionError: when a gradient would have to pass a pending max, min or product.
    """
    return moved(local, move_of(src, dst, shape), how)


def moved(local: torch.Tensor, move: Redistribution, how: How = PLAIN) -> torch.Tensor:
    """As :func:`transition`."""
    tracked = torch.is_grad_enabled() and local.requires_grad
    if tracked and not move.only_sums:
        local, move = _with_sums(local, move)
    if move.src[0] is move.dst[0] and (not tracked or move.src[1] == move.dst[1]) and how.dtypes is None:
        return local
    if comm_trace._active:
        with _described(move, None, "forward"):
            return _run(local, move, how, tracked)
    return _run(local, move, how, tracked)


def _run(local: torch.Tensor, move: Redistribution, how: How, tracked: bool) -> torch.Tensor:
    if move.order is None:
        return _in_order(local, move, how, tracked)
    if how.value is not None:
        how = How(value=how.value.permute(move.order))
    # Back here, as a view that an autograd function returns cannot be written to.
    return _in_order(local.permute(move.order), move, how, tracked).permute(inverse(move.order))


def _in_order(local: torch.Tensor, move: Redistribution, how: How, tracked: bool) -> torch.Tensor:
    """The move of a local tensor whose dims are in the order of memory."""
    return _apply_transition(local, move, how) if tracked else how.run(local, move.plan)


def has_other_reductions(layout: Layout) -> bool:
    """Whether a reduction other than the sum is pending."""
    return layout.is_partial() and bool(_other_reductions(layout))


def _other_reductions(layout: Layout) -> dict[int, str]:
    """Axes with a pending reduction other than the sum, the only one that carries gradients."""
    return {a: p.reduce_op for a, p in enumerate(layout.placements) if is_partial(p) and p.reduce_op != "sum"}


def _with_sums(local: torch.Tensor, move: Redistribution) -> tuple[torch.Tensor, Redistribution]:
    """The same move with every pending average written as a pending sum."""
    layout, varying = move.src
    pending = _other_reductions(layout)
    for axis, op in pending.items():
        if op != "avg":
            raise RedistributionError(
                f"a gradient cannot pass a pending {op} (mesh axis {layout.mesh_dim_names[axis]!r}): "
                "use the operator on a tensor that is not sharded along the reduced dimension, or detach() first",
                op_name="redistribute",
                layouts=[layout],
            )
        local = local / layout.mesh_shape[axis]
    if _other_reductions(move.dst[0]):
        raise RedistributionError(
            "a tensor that needs a gradient can only become Partial('sum'); detach() it first",
            op_name="redistribute",
            layouts=[layout, move.dst[0]],
        )
    src = layout.with_placements(dict.fromkeys(pending, Partial())), varying
    return local, move_of(src, move.dst, move.shape, move.order)


@lru_cache(maxsize=8192)
def target_spec(spec: Spec, layout: Layout, varying: frozenset[int] | None = None) -> Spec:
    """The spec after redistribution to ``layout``, which is a copy where data moves; an axis stays varying while it
    stays Replicate unless told."""
    if varying is None:
        varying = frozenset(a for a in spec.varying if is_replicate(layout.placements[a]))
    if layout is spec.layout and varying == spec.varying:
        return spec
    moved = plan_transition(spec.layout, layout, spec.shape).steps
    stride = spec.dense_stride if moved else spec.stride
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
                f"and is {allowed}, not {grad!r}"
            )
    return wanted, frozenset(a for a in duals if is_replicate(wanted.placements[a]))


class _GradientLayout(torch.autograd.Function):
    """Identity whose gradient is moved from one typed layout to another."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, given: Any, wanted: Any, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.args = (given, wanted, shape)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        given, wanted, shape = ctx.args
        return transition(grad, given, wanted, shape), None, None, None


def convert_gradient(local: torch.Tensor, given: Typed, wanted: Typed, shape: tuple[int, ...]) -> torch.Tensor:
    """The same local tensor, of global shape ``shape``, whose gradient comes in as ``given`` and goes on as
    ``wanted``."""
    result: torch.Tensor = _GradientLayout.apply(local, given, wanted, shape)
    return result
