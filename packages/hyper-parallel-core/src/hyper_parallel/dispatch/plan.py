"""What a cache miss makes: from a rule's decision to a plan for all calls alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Ref, Solution, refuse
from hyper_parallel._rules.op import DistributedOp
from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.dispatch.arguments import make_call, make_call_of
from hyper_parallel.dispatch.cross_mesh import common_mesh
from hyper_parallel.dispatch.plan_cache import PlanCache
from hyper_parallel.sharding.layout import Layout, fit_rank
from hyper_parallel.sharding.mesh import MeshInfo
from hyper_parallel.sharding.placements import is_replicate
from hyper_parallel.sharding.spec import NOT_VARYING, Spec, in_memory_order, make_spec, stride_like, tells_order
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.utils.structures import rebuilt


class DispatchEntry:
    """One torch function and the rule that serves it, with the plans made so far."""

    __slots__ = (
        "by_value",
        "cache",
        "flag_at",
        "func",
        "grad_placements",
        "inplace",
        "name",
        "op",
        "plans",
        "use_reduced",
    )

    def __init__(self, func: Callable[..., Any], op: DistributedOp, name: str) -> None:
        from hyper_parallel._rules.strategy import LayoutOp

        self.func, self.op, self.name = func, op, name
        generic = not isinstance(op, LayoutOp)
        # 0: numbers do not matter; 1: ints do; 2: floats too.
        self.by_value = 1 if generic else 2 if op.floats_matter else int(op.scalars_matter)  # type: ignore[attr-defined]
        self.inplace = is_inplace(name)
        self.flag_at = flag_position(func)
        # A view must be of the tensor itself, so that writes reach it.
        self.use_reduced = not self.inplace and not generic and not op.makes_views  # type: ignore[attr-defined]
        self.grad_placements: Any = None  # a DFunction's own word on its inputs' gradients
        self.plans = PlanCache()
        self.cache = self.plans.young  # what a warm call looks into

    def remember(self, key: Any, plan: Any) -> None:
        """Keep a plan for calls with this key."""
        self.plans.remember(key, plan)

    def recall(self, key: Any) -> Any:
        """A plan that the cache has not, but that was made some time ago; None where it was dropped since."""
        return self.plans.recall(key)


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
    """

    __slots__ = (
        "call",
        "changes",
        "copies",
        "inplace",
        "is_new",
        "is_view",
        "may_turn",
        "mesh",
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
        self.changes: list[tuple[int, Layout, frozenset[int]]] | None = None
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


def is_inplace(name: str) -> bool:
    """Whether a torch function of this name writes its first argument: ``add_``, ``__iadd__``."""
    if name.startswith("__"):
        return (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")) or name == "__setitem__"
    return name.endswith("_")


def flag_position(func: Callable[..., Any]) -> int | None:
    """Position of an ``inplace`` argument, as functions of ``torch.nn.functional`` have."""
    code = getattr(func, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names.index("inplace") if "inplace" in names else None


def is_asked(args: Sequence[Any], kwargs: dict[str, Any], position: int) -> bool:
    """Whether a call with an ``inplace`` argument is to write its first one."""
    return bool(args[position] if len(args) > position else kwargs.get("inplace"))


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


def _check_strict(call: Call, index: int, target: Layout) -> None:
    """Refuse communication under ``"strict"``, as rules by strategies do on their own and those by layouts do not."""
    spec = call.inputs[index]
    if call.mode.policy == "strict" and plan_transition(spec.layout, target, tuple(spec.shape)).communicates:
        raise refuse(
            call,
            f"input {index} would have to become {target}",
            f"redistribute it to {target} first, or use redistribute_policy('partial') or ('auto')",
        )


def _plan_of(rule: DispatchEntry, call: Call, solution: Solution) -> Plan:
    plan = Plan()
    plan.pending = rule.use_reduced and any(spec.layout.is_partial() for spec in call.inputs)
    needed = needs_varying(call, solution)
    changes = []
    for index, (spec, target) in enumerate(zip(call.inputs, solution.targets, strict=True)):
        kept = frozenset(a for a in spec.varying if is_replicate(target.placements[a]))
        varying = kept | needed[index]
        if target is not spec.layout or varying != spec.varying:
            changes.append((index, target, varying))
            if rule.inplace and index == 0 and target is not spec.layout:
                raise refuse(
                    call,
                    f"it writes its first argument, which would have to become {target}",
                    "redistribute that tensor before, or use the out-of-place form",
                )
            _check_strict(call, index, target)
    if changes:
        plan.changes, plan.solution = changes, solution
        plan.places = None if rule.inplace else _places(call, [index for index, _, _ in changes])
        plan.is_view = (solution.is_view or solution.copies) and solution.targets[0] is not call.inputs[0].layout
        return plan
    plan.call = solution.local or rule.func
    plan.ready = not plan.pending
    plan.inplace = rule.inplace
    plan.is_view, plan.copies = solution.is_view or solution.copies, solution.copies
    plan.may_turn = any(map(_is_one_of_several, call.inputs))
    if solution.shapes is not None and not _is_stride_of_meta(call, solution):
        # Dtype and stride are those of the first result.
        layouts = [fit_rank(x, len(n)) for x, n in zip(solution.outputs, solution.shapes, strict=True) if x is not None]
        types = [output_varying(call, solution, x, i) for i, x in enumerate(layouts)]
        plan.unfinished = list(zip(layouts, solution.shapes, types, strict=True))
        return plan
    specs, single = output_specs(rule, call, solution)
    if single:
        plan.spec = specs[0]
    plan.specs = specs
    return plan


def _is_one_of_several(spec: Spec) -> bool:
    """Whether this rank's piece has one element along a dim that is longer: the stride of such a dim is arbitrary, and
    some kernels (``einsum``, convolution) choose the order of their result by it."""
    return any(mine == 1 != whole for mine, whole in zip(spec.local_shape, spec.shape, strict=True))


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
    """Complete a plan from its first result; the result, with its dims in the order that the specs say."""
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
    if (plan.is_view and not plan.copies) or plan.inplace or not plan.specs:
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
    """Local results with their dims in memory as the specs say; ``out`` itself when they are."""
    if isinstance(out, torch.Tensor):
        return out if specs[0] is None else in_memory_order(out, specs[0].memory_order)
    if not isinstance(out, (tuple, list)):
        return out
    ordered = [o if s is None else in_memory_order(o, s.memory_order) for o, s in zip(out, specs, strict=True)]
    return out if all(a is b for a, b in zip(ordered, out, strict=True)) else rebuilt(out, ordered)


def needs_varying(call: Call, solution: Solution) -> list[frozenset[int]]:
    """Per input the axes on which it must enter as varying: "the rule" of docs/gradient-types.md.

    On an axis where a counted input is sharded, pending or varying, every rank computes its own part, so the gradient
    of a Replicate input arrives in terms.
    """
    needed = [NOT_VARYING] * len(call.inputs)
    if not any(call.needs_grad):
        return needed
    counted = [i for i in range(len(call.inputs)) if i not in solution.uncounted]
    for axis in range(call.info.ndim):
        active = any(
            not is_replicate(solution.targets[i].placements[axis])
            or (call.needs_grad[i] and axis in call.inputs[i].varying)
            for i in counted
        )
        if not active:
            continue
        for i in counted:
            if call.needs_grad[i] and not solution.is_invariant(axis, i):
                if is_replicate(solution.targets[i].placements[axis]):
                    needed[i] |= {axis}
    return needed


def vary_axes(tensors: Sequence[DTensor]) -> list[frozenset[int]]:
    """The rule of :func:`needs_varying` for tensors that one local computation reads together."""
    call = make_call_of(tensors)
    return needs_varying(call, Solution([t.layout for t in tensors], []))


def output_specs(rule: DispatchEntry, call: Call, solution: Solution) -> tuple[tuple[Spec | None, ...], bool]:
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


def output_varying(call: Call, solution: Solution, layout: Layout, output: int) -> frozenset[int]:
    """Axes on which a Replicate output is varying: those where all counted inputs are Replicate and one is varying."""
    varying: set[int] = set()
    if not any(spec.varying for spec in call.inputs):
        return NOT_VARYING
    for axis, placement in enumerate(layout.placements):
        if not is_replicate(placement) or (solution.reduced and axis in solution.reduced[output]):
            continue
        counted = [
            i for i in range(len(call.inputs)) if i not in solution.uncounted and not solution.is_invariant(axis, i)
        ]
        replicated = all(is_replicate(solution.targets[i].placements[axis]) for i in counted)
        if replicated and any(call.needs_grad[i] and axis in call.inputs[i].varying for i in counted):
            varying.add(axis)
    return frozenset(varying)


def wrap_many(out: Any, specs: tuple[Spec | None, ...]) -> Any:
    if not isinstance(out, (tuple, list)) or not specs:
        return out  # no tensors, or DTensors already
    return rebuilt(out, [wrap_one(o, s) if s is not None else o for o, s in zip(out, specs, strict=True)])


def wrap_one(out: torch.Tensor, spec: Spec) -> DTensor:
    return wrap(out, spec if out.dtype is spec.dtype else spec.replace(dtype=out.dtype))
