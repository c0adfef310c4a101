"""What a cache miss makes: from a rule's decision to a plan for all calls alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Ref, Solution, refuse
from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.dispatch.arguments import make_call
from hyper_parallel.dispatch.cross_mesh import common_mesh
from hyper_parallel.dispatch.entry import DispatchEntry
from hyper_parallel.dispatch.gradient_types import entering_varying, output_varying
from hyper_parallel.sharding.layout import Layout, fit_rank
from hyper_parallel.sharding.mesh import MeshInfo
from hyper_parallel.sharding.spec import Spec, make_spec, stride_like, tells_order
from hyper_parallel.sharding.stated import as_stated
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.utils.structures import rebuilt

Change = tuple[int, Layout, frozenset[int]]  # index of the input, the layout and the varying axes that it gets


class Plan:
    """What one cache entry says.

    Attributes:
        call: function for the local arguments.
        spec: of the single tensor output; None when ``specs`` or ``inplace`` says otherwise.
        specs: of several outputs, None for those that are no tensors.
        changes: (input index, layout, varying axes) to apply before asking again; None when the inputs fit.
        mesh: the mesh on which the inputs meet, when they are on several.
        solution: what the rule decided, which holds after the changes.
        inplace: the first argument is the result.
        is_new: no call has used it yet, so that :func:`finish` is due.
        places: where the inputs to change are: position of the argument, or its name; None when one is inside a list,
            or a target to be written, which has to stay the tensor that it is.
        then: the plan after the changes, once it is known.
        pending: whether an input is a pending sum, of which there may be a form that was reduced before.
        ready: whether calls alike can be run as they are.
        may_turn: whether the memory order of results may change from call to call, though calls are alike.
        is_view, copies: as in :class:`~hyper_parallel._rules.call.Solution`.
        name: of the function, where the results are views or copies.
        carry_write: of the rule, for this function; None where writes to a copy are refused.
    """

    __slots__ = (
        "call",
        "carry_write",
        "changes",
        "copies",
        "inplace",
        "is_new",
        "is_view",
        "may_turn",
        "mesh",
        "name",
        "pending",
        "places",
        "ready",
        "solution",
        "spec",
        "specs",
        "then",
        "unfinished",
    )

    def __init__(self) -> None:
        self.call: Any = None
        self.spec: Spec | None = None
        self.specs: tuple[Spec | None, ...] = ()
        self.changes: list[Change] | None = None
        self.mesh: MeshInfo | None = None
        self.solution: Solution | None = None
        self.unfinished: list[Any] | None = None
        self.places: list[int | str] | None = None
        self.then: Plan | None = None
        self.pending = False
        self.inplace = False
        self.is_new = True
        self.is_view = False
        self.ready = False
        self.may_turn = False
        self.copies = False
        self.name = ""
        self.carry_write: Callable[..., None] | None = None

    def makes_memory(self) -> bool:
        """Whether results have memory of their own, the order of whose dims the specs say."""
        return not self.inplace and (self.copies or not self.is_view)


def make_plan(rule: DispatchEntry, args: Sequence[Any], kwargs: dict[str, Any], solution: Solution | None) -> Plan:
    call = make_call(rule.op, rule, tuple(args), kwargs)
    mesh = common_mesh(call) if rule.op.one_mesh else None
    if mesh is not None:
        plan = Plan()
        plan.changes, plan.mesh = [], mesh
        return plan
    if solution is None:
        solution = rule.op.infer((call,))[1]
    return _plan_of(rule, call, solution)


def changes_of(call: Call, solution: Solution, varying: Sequence[frozenset[int]]) -> list[Change]:
    """What has to be done to the inputs, so that they have the solution's layouts and these varying axes."""
    found = []
    for index, (spec, target) in enumerate(zip(call.inputs, solution.targets, strict=True)):
        if target is not spec.layout or varying[index] != spec.varying:
            found.append((index, target, varying[index]))
    return found


def _check_allowed(rule: DispatchEntry, call: Call, changes: Sequence[Change]) -> None:
    """Refuse another layout of what is written, and communication under ``"strict"``, as rules by strategies do on
    their own and those by layouts do not."""
    for index, target, _ in changes:
        spec = call.inputs[index]
        if rule.inplace and index == 0 and target is not spec.layout:
            raise refuse(
                call,
                f"it writes its first argument, which would have to become {target}",
                "redistribute that tensor before, or use the out-of-place form",
            )
        if call.mode.policy == "strict" and plan_transition(spec.layout, target, tuple(spec.shape)).communicates:
            raise refuse(
                call,
                f"input {index} would have to become {target}",
                f"redistribute it to {target} first, or use redistribute_policy('partial') or ('auto')",
            )


def _plan_of(rule: DispatchEntry, call: Call, solution: Solution) -> Plan:
    plan = Plan()
    plan.pending = rule.use_reduced and any(spec.layout.is_partial() for spec in call.inputs)
    changes = changes_of(call, solution, entering_varying(call, solution))
    if changes:
        _check_allowed(rule, call, changes)
        plan.changes, plan.solution = changes, solution
        plan.places = None if rule.inplace else _places(call, [index for index, _, _ in changes])
        plan.is_view = (solution.is_view or solution.copies) and solution.targets[0] is not call.inputs[0].layout
        return plan
    plan.call = solution.local or rule.func
    plan.ready = not plan.pending
    plan.inplace = rule.inplace
    plan.is_view, plan.copies = solution.is_view or solution.copies, solution.copies
    if plan.is_view:
        op: Any = rule.op
        plan.name, plan.carry_write = rule.name, partial(op.carry_write, rule.func) if op.carries_writes else None
    plan.may_turn = plan.makes_memory() and any(map(_is_one_of_several, call.inputs))
    if solution.shapes is not None and not _is_stride_of_meta(call, solution):
        # Dtype and stride are those of the first result.
        layouts = [fit_rank(x, len(n)) for x, n in zip(solution.outputs, solution.shapes, strict=True) if x is not None]
        types = [output_varying(call, solution, x, i) for i, x in enumerate(layouts)]
        plan.unfinished = list(zip(layouts, solution.shapes, types, strict=True))
        return plan
    specs, single = output_specs(call, solution)
    if single:
        plan.spec = specs[0]
    plan.specs = specs
    return plan


def _is_one_of_several(spec: Spec) -> bool:
    """Whether this rank's piece has one element along a dim that is longer: the stride of such a dim is arbitrary, and
    some kernels (``einsum``, convolution) choose the order of their result by it."""
    local = spec.local_shape
    return 1 in local and any(mine == 1 != whole for mine, whole in zip(local, spec.shape, strict=True))


def _places(call: Call, indices: Sequence[int]) -> list[int | str] | None:
    """The arguments that inputs are; None when one is inside a list."""
    found: dict[int, int | str] = {a.index: i for i, a in enumerate(call.args) if isinstance(a, Ref)}
    found.update({v.index: name for name, v in call.kwargs.items() if isinstance(v, Ref)})
    return [found[i] for i in indices] if all(i in found for i in indices) else None


def _is_stride_of_meta(call: Call, solution: Solution) -> bool:
    """Whether the strides of the outputs come from meta tensors, although the rule knows their shapes: local results do
    not tell them when another function makes them, or when some rank's piece is too small."""
    outputs = [(x, n) for x, n in zip(solution.outputs, solution.shapes or (), strict=True) if x is not None]
    if solution.local is None and all(tells_order(fit_rank(x, len(n)), n) for x, n in outputs):
        return False
    try:
        call.meta_result(solution.meta)
    except Exception:
        # PyTorch has no meta kernel (bincount), or one for fewer dtypes (_grouped_mm); those of others want memory, or
        # assert a device. What is wrong with the arguments themselves is raised by the function.
        return False
    return True


def finish(plan: Plan, out: Any) -> Any:
    """Complete a plan from its first result; the result, in memory as the specs say."""
    plan.is_new = False
    single = isinstance(out, torch.Tensor)
    outs = (out,) if single else tuple(out) if isinstance(out, (tuple, list)) else ()
    if plan.unfinished is not None:
        plan.specs = tuple(
            make_spec(layout, shape, stride_like(o, shape, layout), o.dtype, varying)
            for (layout, shape, varying), o in zip(plan.unfinished, outs, strict=True)
        )
        plan.unfinished = None
        if single:
            plan.spec = plan.specs[0]
    if not plan.specs or not plan.makes_memory():
        return out
    ordered = in_order_of(out, plan.specs)
    if plan.may_turn or ordered is not out:  # what the kernel chose otherwise for the piece, it will again
        plan.call = _ordering(plan.call, plan.specs, ordered.stride() if single else None)
    return ordered


def _ordering(
    call: Callable[..., Any], specs: Sequence[Spec | None], usual: Sequence[int] | None
) -> Callable[..., Any]:
    """A plan's call with the dims of its results in order; that a single one has its usual stride, and so is in order,
    is seen sooner than by its dims."""

    def ordered(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        return out if usual is not None and out.stride() == usual else in_order_of(out, specs)

    return ordered


def in_order_of(out: Any, specs: Sequence[Spec | None]) -> Any:
    """Local results that lie in memory as the specs say; ``out`` itself when they do."""
    if isinstance(out, torch.Tensor):
        return out if specs[0] is None else as_stated(out, specs[0])
    if not isinstance(out, (tuple, list)):
        return out
    ordered = [o if s is None else as_stated(o, s) for o, s in zip(out, specs, strict=True)]
    return out if all(a is b for a, b in zip(ordered, out, strict=True)) else rebuilt(out, ordered)


def output_specs(call: Call, solution: Solution) -> tuple[tuple[Spec | None, ...], bool]:
    """Specs of the outputs, their global shapes found by running the function on meta tensors."""
    result = call.meta_result(solution.meta)
    single = isinstance(result, torch.Tensor)
    results = (result,) if single else tuple(result) if isinstance(result, (tuple, list)) else ()
    specs: list[Spec | None] = []
    layouts = iter(solution.outputs)
    position = 0
    for value in results:
        layout = next(layouts, None) if isinstance(value, torch.Tensor) else None
        if layout is None:
            specs.append(None)
            continue
        layout = fit_rank(layout, value.ndim)
        varying = output_varying(call, solution, layout, position)
        specs.append(make_spec(layout, tuple(value.shape), value.stride(), value.dtype, varying))
        position += 1
    return tuple(specs), single


def wrap_many(out: Any, specs: tuple[Spec | None, ...]) -> Any:
    if not isinstance(out, (tuple, list)) or not specs:
        return out  # no tensors, or DTensors already
    return rebuilt(out, [wrap_one(o, s) if s is not None else o for o, s in zip(out, specs, strict=True)])


def wrap_one(out: torch.Tensor, spec: Spec) -> DTensor:
    return wrap(out, spec if out.dtype is spec.dtype else spec.replace(dtype=out.dtype))
