"""The dispatcher: from a torch function on DTensors to the local call.

A warm call is one dictionary lookup: the key holds the specs of the DTensors (by identity), which of them need a
gradient, and the other arguments. What it finds is a :class:`_Plan`: the function to run on the local tensors and the
specs of what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import autograd_bridge
from hyper_parallel.autograd_bridge import Marks
from hyper_parallel.call import Call, Ref, Solution, refuse
from hyper_parallel.context import state
from hyper_parallel.errors import MissingOpError
from hyper_parallel.layout import Layout
from hyper_parallel.mesh import MeshInfo
from hyper_parallel.op import DistributedOp, FunctionOp
from hyper_parallel.placements import Replicate, is_partial, is_replicate, is_shard
from hyper_parallel.redistribute import varying_axes
from hyper_parallel.registry import LISTENERS, default_registry, get_distributed_op
from hyper_parallel.spec import NOT_VARYING, Spec, contiguous_stride, make_spec, stride_like

__all__ = ["dispatch"]

CACHE_LIMIT = 4096  # plans per function; a full cache starts afresh

_grad_enabled = torch.is_grad_enabled


class _Rule:
    """One torch function and the rule that serves it, with the plans made so far."""

    __slots__ = ("by_value", "cache", "func", "generic", "grad_placements", "inplace", "name", "op", "parsed")

    def __init__(self, func: Callable[..., Any], op: DistributedOp, name: str) -> None:
        from hyper_parallel.strategy import LayoutOp

        self.func, self.op, self.name = func, op, name
        self.generic = not isinstance(op, LayoutOp)
        # 0: numbers do not matter; 1: ints do; 2: floats too.
        self.by_value = 1 if self.generic else 2 if op.floats_matter else int(op.scalars_matter)  # type: ignore[attr-defined]
        self.parsed = None if self.generic else op._parsed  # type: ignore[attr-defined]
        self.inplace = is_inplace(name)
        self.grad_placements: Any = None  # a DFunction's own word on its inputs' gradients
        self.cache: dict[tuple[Any, ...], _Plan] = {}


class _Plan:
    """What one cache entry says.

    Attributes:
        call: function for the local arguments.
        spec: of the single tensor output; None when ``specs`` or ``inplace`` says otherwise.
        specs: of several outputs, None for those that are no tensors.
        changes: (input index, layout, varying axes) to apply before asking again; None when the inputs fit.
        mesh: the mesh on which the inputs meet, when they are on several.
        solution: what the rule decided, which holds after the changes.
        inplace: the first argument is the result.
    """

    __slots__ = ("call", "changes", "inplace", "is_view", "mesh", "solution", "spec", "specs", "unfinished")

    def __init__(self) -> None:
        self.call: Any = None
        self.spec: Spec | None = None
        self.specs: tuple[Spec | None, ...] = ()
        self.changes: list[tuple[int, Layout, frozenset[int]]] | None = None
        self.mesh: MeshInfo | None = None
        self.solution: Solution | None = None
        self.unfinished: list[Any] | None = None
        self.inplace = False
        self.is_view = False


_rules: dict[Any, Any] = {}


def is_inplace(name: str) -> bool:
    """Whether a torch function of this name writes its first argument: ``add_``, ``__iadd__``."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__") or name == "__setitem__"
    return name.endswith("_")


# -- the way of every call ----------------------------------------------------------------------------------------


def dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Run ``func`` on arguments that contain DTensors."""
    mode = state.mode
    rule = _rules.get(func)
    if rule is None:
        rule = _find(func)
    if rule.__class__ is not _Rule:
        return rule(func, args, kwargs or {})
    if mode.skip:
        return _on_locals(func, args, kwargs or {})
    if rule.generic:
        return _three_phases(rule, args, kwargs or {})
    grad = _grad_enabled()
    solution = None
    copied = False
    while True:
        key: list[Any] = [grad, mode]
        local_args: list[Any] = []
        if not _scan(args, key, local_args, grad, rule.by_value):
            return _with_plain(func, args, kwargs or {})
        local_kwargs: dict[str, Any] = {}
        if kwargs:
            if kwargs.get("out") is not None:
                return _into_out(func, args, kwargs)
            values: list[Any] = []
            for name in kwargs:
                key.append(name)
            if not _scan(kwargs.values(), key, values, grad, rule.by_value):
                return _with_plain(func, args, kwargs)
            local_kwargs = dict(zip(kwargs, values, strict=True))
        lookup = tuple(key)
        plan = rule.cache.get(lookup)
        if plan is None:
            plan = _make_plan(rule, args, kwargs or {}, solution)
            if len(rule.cache) >= CACHE_LIMIT:
                rule.cache.clear()
            rule.cache[lookup] = plan
        if plan.changes is None:
            break
        if plan.mesh is not None:
            args, kwargs = _on_mesh(args, kwargs or {}, plan.mesh)
            continue
        args, kwargs = _changed(args, kwargs or {}, plan, rule.inplace)
        solution = plan.solution  # what was decided holds for the changed inputs
        copied = copied or plan.is_view
    if plan.inplace:
        return _run_inplace(plan, args, local_args, local_kwargs)
    out = plan.call(*local_args, **local_kwargs)
    spec = plan.spec
    if spec is None and plan.unfinished is not None:
        _finish(plan, out)
        spec = plan.spec
    if spec is None:
        many = _wrap_many(out, plan.specs)
        if plan.is_view:
            for view in many:
                _note_base(view, args[0], rule.name if copied else None)
        return many
    if out.dtype is not spec.dtype:  # autocast chose another dtype
        spec = spec.replace(dtype=out.dtype)
    result = _make_wrapper(
        DTensor, spec.shape, spec.stride, dtype=spec.dtype, device=out.device, requires_grad=grad and out.requires_grad
    )
    result._local = out
    result._spec = spec
    if not grad:
        result._pending = Marks.now
    if plan.is_view:
        _note_base(result, args[0], rule.name if copied else None)
    return result


_BY_VALUE = frozenset([bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout])


def _scan(values: Any, key: list[Any], local: list[Any], grad: bool, by_value: int) -> bool:
    """Append the cache key and the local form of each value; False when a plain tensor is among them."""
    for value in values:
        kind = value.__class__
        if kind is DTensor:
            tensor = value._local if value._pending is None else value._resolve()
            key.append(value._spec)
            if grad:
                key.append(tensor.requires_grad)
            local.append(tensor)
        elif kind is float:
            key.append(kind)
            if by_value == 2:
                key.append(value)
            local.append(value)
        elif kind is int:
            key.append(kind)
            if by_value:
                key.append(value)
            local.append(value)
        elif kind in _BY_VALUE:
            key.append(kind)
            key.append(value)
            local.append(value)
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append(kind)
            key.append(len(value))
            inner: list[Any] = []
            if not _scan(value, key, inner, grad, by_value):
                return False
            local.append(inner if kind is list else tuple(inner))
        elif isinstance(value, torch.Tensor):
            return False
        elif kind is slice:
            key.append(kind)
            # A tensor as bound is read here: the layout of the result depends on its value.
            bounds = [int(b) if isinstance(b, torch.Tensor) else b for b in (value.start, value.stop, value.step)]
            key.extend(bounds)
            local.append(slice(*bounds))
        else:
            key.append(kind)
            key.append(value if getattr(value, "__hash__", None) else id(value))
            local.append(value)
    return True


def _wrap_many(out: Any, specs: tuple[Spec | None, ...]) -> Any:
    if not isinstance(out, (tuple, list)):
        return out
    wrapped = [_wrap_one(o, s) if s is not None else o for o, s in zip(out, specs, strict=True)]
    kind = type(out)
    return kind(wrapped) if kind in (tuple, list) or hasattr(kind, "n_sequence_fields") else kind(*wrapped)


def _wrap_one(out: torch.Tensor, spec: Spec) -> DTensor:
    return wrap(out, spec if out.dtype is spec.dtype else spec.replace(dtype=out.dtype))


# -- finding the rule ---------------------------------------------------------------------------------------------


def _find(func: Callable[..., Any]) -> Any:
    """The rule or special handler of a function, remembered."""
    registry = default_registry()
    special = _special(func)
    if special is not None:
        _rules[func] = special
        return special
    if func in _named:
        op_name, gradients = _named[func]
        rule = _rules[func] = _Rule(func, get_distributed_op(op_name), op_name)
        rule.grad_placements = gradients
        return rule
    op = registry.find(func)
    if op is None:
        raise MissingOpError(registry.missing_message(func), func=func)
    if isinstance(op, FunctionOp):
        rule = _rules[func] = _of_function(op)
    else:
        rule = _rules[func] = _Rule(func, op, getattr(func, "__name__", None) or str(func))
    return rule


def _of_function(op: FunctionOp) -> Callable[..., Any]:
    def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return _on_locals(func, args, kwargs) if state.mode.skip else op.run(func, args, kwargs)

    return run


def register_function(func: Callable[..., Any], op_name: str, grad_placements: Any = None) -> Callable[..., Any]:
    """Serve a function of local tensors by the op registered under a name; returns the key for :func:`dispatch`."""
    _named[func] = (op_name, grad_placements)
    return func


_named: dict[Any, tuple[str, Any]] = {}


def forget_rules() -> None:
    """Drop what was remembered; the registry calls this when its contents change."""
    _rules.clear()


LISTENERS.append(forget_rules)


# -- a miss -------------------------------------------------------------------------------------------------------


def _make_plan(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any], solution: Solution | None) -> _Plan:
    call = make_call(rule.op, rule, tuple(args), kwargs)
    mesh = common_mesh(call) if rule.op.one_mesh else None
    if mesh is not None:
        plan = _Plan()
        plan.changes, plan.mesh = [], mesh
        return plan
    if solution is None:
        solution = rule.op.infer((call,))[1]
    return _plan_of(rule, call, solution)


def _plan_of(rule: _Rule, call: Call, solution: Solution) -> _Plan:
    plan = _Plan()
    needed = _needs_varying(call, solution)
    changes = []
    for index, (spec, target) in enumerate(zip(call.inputs, solution.targets, strict=True)):
        kept = frozenset(a for a in spec.varying if is_replicate(target.placements[a]))
        varying = kept | needed[index]
        if target is not spec.layout or varying != spec.varying:
            changes.append((index, target, varying))
    if changes:
        plan.changes, plan.solution = changes, solution
        plan.is_view = solution.is_view and solution.targets[0] is not call.inputs[0].layout
        return plan
    plan.call = solution.local or rule.func
    plan.inplace = rule.inplace
    plan.is_view = solution.is_view
    if solution.shapes is not None:
        # Dtype and stride are those of the first result.
        layouts = [_fit_rank(x, len(n)) for x, n in zip(solution.outputs, solution.shapes, strict=True) if x is not None]
        varying = [_output_varying(call, solution, x, i) for i, x in enumerate(layouts)]
        plan.unfinished = list(zip(layouts, solution.shapes, varying, strict=True))
        return plan
    specs, single = _output_specs(rule, call, solution)
    if single:
        plan.spec = specs[0]
    plan.specs = specs
    return plan


def _finish(plan: _Plan, out: Any) -> None:
    """Complete the specs of a plan from its first result."""
    outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
    parts = plan.unfinished or ()
    plan.unfinished = None
    plan.specs = tuple(
        make_spec(layout, shape, stride_like(o, shape), o.dtype, varying)
        for (layout, shape, varying), o in zip(parts, outs, strict=True)
    )
    if isinstance(out, torch.Tensor):
        plan.spec = plan.specs[0]


def _needs_varying(call: Call, solution: Solution) -> list[frozenset[int]]:
    """Per input the axes on which it must enter as varying (DESIGN of gradient types: "the rule").

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
    """The rule of :func:`_needs_varying` for tensors that one local computation reads together."""
    call = make_call_of(tensors)
    return _needs_varying(call, Solution([t.layout for t in tensors], []))


def _output_specs(rule: _Rule, call: Call, solution: Solution) -> tuple[tuple[Spec | None, ...], bool]:
    """Specs of the outputs, their global shapes found by running the function on meta tensors."""
    with torch.no_grad():
        args, kwargs = _meta(call.args), {k: _meta(v) for k, v in call.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = "meta"
        result = (solution.meta or rule.func)(*args, **kwargs)
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
        layout = _fit_rank(layout, value.ndim)
        varying = _output_varying(call, solution, layout, position)
        specs.append(make_spec(layout, tuple(value.shape), value.stride(), value.dtype, varying))
        position += 1
    return tuple(specs), single


def _fit_rank(layout: Layout, ndim: int) -> Layout:
    """A layout for a tensor of ``ndim`` dims; the engine knows an output's rank only from its shards."""
    if layout.ndim == ndim:
        return layout
    order = layout.shard_order
    return layout.with_order(layout.placements, (order + ((),) * (ndim - len(order)))[:ndim])


def _output_varying(call: Call, solution: Solution, layout: Layout, output: int) -> frozenset[int]:
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


def _meta(value: Any) -> Any:
    if isinstance(value, Ref):
        return value.spec.meta
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_meta(v) for v in value)
    return value


def make_call(op: DistributedOp, rule: _Rule | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call as rules see it."""
    inputs: list[Spec] = []
    needs_grad: list[bool] = []
    grad = _grad_enabled()

    def seen(value: Any) -> Any:
        if isinstance(value, DTensor):
            inputs.append(value._spec)
            needs_grad.append(grad and value._resolve().requires_grad)
            return Ref(len(inputs) - 1, value._spec)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(seen(v) for v in value)
        return value

    seen_args = tuple(seen(a) for a in args)
    seen_kwargs = {name: seen(value) for name, value in kwargs.items()}
    func = rule.func if rule else getattr(torch, op.op_name, None)
    call = Call(
        func,  # type: ignore[arg-type]
        rule.name if rule else op.op_name,
        seen_args,
        seen_kwargs,
        inputs,
        needs_grad,
        state.mode,
        getattr(op, "_parsed", None),
        bool(rule and rule.inplace),
    )
    return call


def make_call_of(tensors: Sequence[DTensor]) -> Call:
    """A call of no operator in particular on these tensors."""
    grad = _grad_enabled()
    specs = [t._spec for t in tensors]
    needs_grad = [grad and t._resolve().requires_grad for t in tensors]
    return Call(_on_locals, "custom_shard", (), {}, specs, needs_grad, state.mode, None, False)


def local_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with local tensors in the place of DTensors."""
    return tuple(_local(a) for a in args), {k: _local(v) for k, v in kwargs.items()}


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._resolve()
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_local(v) for v in value)
    return value


# -- inputs on several meshes -------------------------------------------------------------------------------------


def common_mesh(call: Call) -> MeshInfo | None:
    """The sub-mesh on which inputs from different meshes meet; None when all are on one mesh.

    Raises:
        RedistributionError: when one is not part of the other, or an input is sharded or pending over the extra axes.
    """
    infos = {spec.layout.info for spec in call.inputs}
    if len(infos) == 1:
        return None
    smallest = min(infos, key=lambda info: info.ndim)
    for index, spec in enumerate(call.inputs):
        layout = spec.layout
        extra = layout.info.axes_beyond(smallest)
        if extra is None or not all(is_replicate(layout.placements[a]) for a in extra):
            raise refuse(
                call,
                f"the inputs are on different meshes: {smallest!r}, and input {index} on {layout.info!r}",
                "build them on one mesh; a tensor on a larger mesh can join an operator on a sub-mesh of it (mesh['tp']) when it "
                "is Replicate over the other axes",
            )
    return smallest


def _on_mesh(args: Sequence[Any], kwargs: dict[str, Any], info: MeshInfo) -> tuple[Any, Any]:
    def change(tensor: torch.Tensor) -> Any:
        return to_sub_mesh(tensor, info) if isinstance(tensor, DTensor) else tensor

    return tuple(_map_tensors(a, change) for a in args), {k: _map_tensors(v, change) for k, v in kwargs.items()}


def to_sub_mesh(tensor: DTensor, info: MeshInfo) -> DTensor:
    """A tensor that is Replicate over a mesh's extra axes, on the sub-mesh: every sub-mesh gets its copy, and the gradients
    of the copies are summed."""
    layout = tensor.layout
    extra = layout.info.axes_beyond(info)
    if not extra:
        return tensor
    copies = remembered(tensor, layout, tensor._spec.varying | frozenset(extra))
    axes = [layout.info.names.index(name) for name in info.names]
    order = {d: [axes.index(a) for a in by] for d, by in enumerate(layout.shard_order) if by}
    inner = Layout.from_placements(info.mesh, [layout.placements[a] for a in axes], ndim=layout.ndim, shard_order=order)
    varying = frozenset(axes.index(a) for a in tensor._spec.varying if a in axes)
    return wrap(copies._resolve(), tensor._spec.replace(layout=inner, varying=varying))


# -- inputs that have to change -----------------------------------------------------------------------------------


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_map_tensors(v, change) for v in value)
    return value


def _changed(args: Sequence[Any], kwargs: dict[str, Any], plan: _Plan, inplace: bool) -> tuple[Any, Any]:
    """The arguments with the plan's redistributions applied to the DTensors."""
    changes = {index: (layout, varying) for index, layout, varying in plan.changes or ()}
    counter = iter(range(1 << 30))

    def change(tensor: torch.Tensor) -> Any:
        index = next(counter)
        found = changes.get(index)
        if found is None:
            return tensor
        if inplace and index == 0:
            return vary_in_place(tensor, found[1])  # type: ignore[arg-type]
        return remembered(tensor, *found)  # type: ignore[arg-type]

    new_args = tuple(_map_tensors(a, change) for a in args)
    return new_args, {name: _map_tensors(value, change) for name, value in kwargs.items()}


def _with_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Plain tensors among the arguments: 0-dim ones count as Replicate, others need implicit_replication."""
    found: list[DTensor] = []
    for value in (*args, *kwargs.values()):
        _map_tensors(value, lambda t: found.append(t) if isinstance(t, DTensor) else None)
    layout = found[0].layout

    def lift(tensor: torch.Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        number = tensor.ndim == 0 and not (tensor.requires_grad and _grad_enabled())
        if not number and not state.mode.replicate_plain:
            name = getattr(func, "__name__", str(func))
            raise TypeError(
                f"{name}: a plain tensor of shape {tuple(tensor.shape)} is mixed with a DTensor of shape "
                f"{tuple(found[0].shape)}, {layout}. Say how it is laid out: distribute_tensor(tensor, mesh, placements) or "
                "DTensor.from_local(...); or, when every rank holds the same values, run inside "
                "`with hyper_parallel.implicit_replication():`"
            )
        return replica(tensor)

    def replica(tensor: torch.Tensor) -> DTensor:
        spec = make_spec(layout.replicated(tensor.ndim), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        return wrap(tensor, spec)

    if is_inplace(getattr(func, "__name__", "")) and not isinstance(args[0], DTensor):
        return _into_plain(func, args, kwargs, lift)
    unread = getattr(_rules[func].op, "uncounted", ())  # read only for shape, dtype or device: any plain tensor will do

    def as_is(tensor: torch.Tensor) -> DTensor:
        return tensor if isinstance(tensor, DTensor) else replica(tensor)

    new_args = tuple(_map_tensors(a, as_is if i in unread else lift) for i, a in enumerate(args))
    return dispatch(func, new_args, {name: _map_tensors(value, lift) for name, value in kwargs.items()})


def _into_plain(func: Any, args: Sequence[Any], kwargs: dict[str, Any], lift: Callable[[Any], DTensor]) -> Any:
    """An in-place operator on a plain tensor: right only while the result is equal on all ranks, gradient included."""
    target = args[0]
    lifted = lift(target)
    before = lifted._spec
    dispatch(func, (lifted, *(_map_tensors(a, lift) for a in args[1:])), {k: _map_tensors(v, lift) for k, v in kwargs.items()})
    if lifted._spec is not before:
        raise TypeError(
            f"{func.__name__}: an in-place operator on a plain tensor with a DTensor that is sharded, pending or varying; "
            "the plain tensor cannot hold the result. Make the target a DTensor"
        )
    return target


def _into_out(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The ``out=`` form: compute, then write into the given DTensors, whose layout stays."""
    out = kwargs["out"]
    result = dispatch(func, args, {k: v for k, v in kwargs.items() if k != "out"})
    many = isinstance(out, (tuple, list))
    for target, value in zip(out if many else (out,), result if many else (result,), strict=True):
        if not isinstance(target, DTensor):
            raise TypeError("out= must be a DTensor when an input is one")
        if target.shape != value.shape:
            raise ValueError(f"out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}; a DTensor is not resized")
        if value.layout is not target.layout:
            if state.mode.policy != "auto" and not value.layout.is_partial():
                raise ValueError(f"out= is laid out as {target.layout}, the result as {value.layout}; redistribute one of them")
            value = value.redistribute(target.layout)
        target._resolve().copy_(value._resolve())
    return out


# -- in place -----------------------------------------------------------------------------------------------------


def _run_inplace(plan: _Plan, args: Sequence[Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
    """Write the target's local tensor; the target keeps its identity and placements, and may turn varying."""
    target = args[0]
    if isinstance(target, (list, tuple)):  # foreach and fused operators
        for tensor in target:
            before_write(tensor)
        plan.call(*local_args, **local_kwargs)
        return None
    before_write(target)
    before = local_args[0].requires_grad
    out = plan.call(*local_args, **local_kwargs)
    if plan.unfinished is not None:
        _finish(plan, out)
    spec = plan.spec or plan.specs[0] if plan.specs else None
    if spec is not None and spec.varying != target._spec.varying:
        _flag_varying(target, spec.varying)
    if local_args[0].requires_grad and not before:
        autograd_bridge.set_wrapper_requires_grad(target, True)
    return target


def _note_base(view: DTensor, base: DTensor, copied_by: str | None) -> None:
    """Whose view a view is; with ``copied_by``, that it is none because its input had to be redistributed."""
    if copied_by is not None:
        view._copied_by = copied_by
    else:
        view._base_dtensor = _root(base)


def _root(tensor: DTensor) -> DTensor:
    """The DTensor of which this one is a view; itself when it is none."""
    return tensor if tensor._base_dtensor is None else tensor._base_dtensor


def before_write(target: DTensor) -> None:
    """What comes before every in-place write to a DTensor.

    Raises:
        RuntimeError: the target is a redistributed copy where PyTorch would have a view, so the write would be lost.
    """
    root = _root(target)
    if root._tracked is not None:  # a write through .data, which the version counter does not see
        root._tracked._memo = None
    autograd_bridge.before_write(target)
    if root is not target:
        autograd_bridge.before_write(root)
    name = root._copied_by
    if name is not None:
        raise RuntimeError(
            f"in-place write to the result of {name}(), which here is a redistributed copy and not a view: the write would be "
            "lost. Redistribute the tensor before the view is taken, or clone() the result if only the copy is to change"
        )


def _flag_varying(target: DTensor, varying: frozenset[int]) -> None:
    for tensor in {id(t): t for t in (target, target._base_dtensor) if t is not None}.values():
        tensor._spec = tensor._spec.replace(varying=tensor._spec.varying | varying)


class _VaryInPlace(torch.autograd.Function):
    """A local tensor turns varying where it is; views of it follow."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, old: Any, new: Any, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.args = (old, new, shape)
        ctx.mark_dirty(local)
        return local

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        from hyper_parallel.redistribute import transition
        from hyper_parallel.spec import dual

        old, new, shape = ctx.args
        return transition(grad, dual(*new), dual(*old), shape), None, None, None


def vary_in_place(target: DTensor, varying: frozenset[int]) -> DTensor:
    """Turn the target of an in-place operator (and the tensor it is a view of) varying."""
    root = _root(target)
    old = root._spec
    if root._resolve().requires_grad:
        layout = old.layout
        _VaryInPlace.apply(root._local, (layout, old.varying), (layout, old.varying | varying), tuple(old.shape))
    _flag_varying(target, varying)
    return target


# -- operators that use the three phases themselves ---------------------------------------------------------------


def _three_phases(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    op = rule.op
    call = make_call(op, rule, tuple(args), kwargs)
    mesh = common_mesh(call) if op.one_mesh else None
    if mesh is not None:
        return dispatch(rule.func, *_on_mesh(args, kwargs, mesh))
    solution = Solution([spec.layout for spec in call.inputs], [])
    if not op.allow_partial_inputs and state.mode.policy != "strict":
        solution.targets = [
            s.layout.with_placements({a: Replicate() for a, p in enumerate(s.layout.placements) if is_partial(p)})
            for s in call.inputs
        ]
    local_args, local_kwargs, values = op.preprocess(args, kwargs)
    key = (values, tuple(call.inputs), tuple(call.needs_grad), _grad_enabled(), state.mode)
    found = rule.cache.get(key)  # type: ignore[arg-type]
    if found is None:
        found = _infer_generic(rule, call, solution, values)
        if len(rule.cache) >= CACHE_LIMIT:
            rule.cache.clear()
        rule.cache[key] = found  # type: ignore[index]
    plan, result = found  # type: ignore[misc]
    if plan.changes is not None:
        return dispatch(rule.func, *_changed(args, kwargs, plan, rule.inplace))
    local = plan.call or op.get_expand_impl(rule.func, result, values) or rule.func
    if rule.inplace:
        running = _Plan()
        running.call, running.specs = local, plan.specs
        return _run_inplace(running, args, list(local_args), local_kwargs)
    out = local(*local_args, **local_kwargs)
    if not plan.specs:
        plan.specs = _specs_from_local(rule, call, result[0], out)
    if isinstance(out, (tuple, list)):
        return _wrap_many(out, plan.specs)
    return _wrap_one(out, plan.specs[0]) if plan.specs[0] is not None else out


def _infer_generic(rule: _Rule, call: Call, solution: Solution, values: Any) -> tuple[_Plan, Any]:
    plan = _Plan()
    needed = _needs_varying(call, solution)
    for index, given in enumerate(rule.grad_placements or ()):
        if given is not None:
            needed[index] = varying_axes(call.inputs[index].layout, given)
    changes = [
        (i, t, frozenset(a for a in s.varying if is_replicate(t.placements[a])) | needed[i])
        for i, (s, t) in enumerate(zip(call.inputs, solution.targets, strict=True))
    ]
    changes = [c for c in changes if c[1] is not call.inputs[c[0]].layout or c[2] != call.inputs[c[0]].varying]
    if changes:
        plan.changes = changes
        return plan, None
    outputs, extra = rule.op.infer(values)
    if not rule.op.allow_partial_inputs:
        rule.op._check_partial_inputs([s.layout for s in call.inputs])
    if rule.op.cache_expand:
        plan.call = rule.op.get_expand_impl(rule.func, (outputs, extra), values) or rule.func
    return plan, (outputs, extra)


def _specs_from_local(rule: _Rule, call: Call, layouts: Sequence[Any], out: Any) -> tuple[Spec | None, ...]:
    """Specs of the outputs of an operator that says only their layouts.

    Global shapes come from the function on meta tensors; a function without meta support must have even shards.
    """
    values = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    bound = [layout.bind() if isinstance(layout, Layout) else None for layout in layouts]
    solution = Solution([s.layout for s in call.inputs], bound)
    tensors = iter(bound)
    specs: list[Spec | None] = []
    try:
        found, _ = _output_specs(rule, call, solution)
    except (NotImplementedError, RuntimeError):
        found = ()
    if len(found) == len(values) and all(f is not None for f, v in zip(found, values, strict=True) if isinstance(v, torch.Tensor)):
        return found
    for position, value in enumerate(values):
        layout = next(tensors, None) if isinstance(value, torch.Tensor) else None
        if layout is None:
            specs.append(None)
            continue
        layout = _fit_rank(layout, value.ndim)
        shape = list(value.shape)
        for axis, placement in enumerate(layout.placements):
            if is_shard(placement):
                shape[placement.dim] *= layout.mesh_shape[axis]
        varying = _output_varying(call, solution, layout, position)
        specs.append(make_spec(layout, shape, contiguous_stride(shape), value.dtype, varying))
    return tuple(specs)


# -- functions that need no rule ----------------------------------------------------------------------------------


def _on_locals(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    local_args, local_kwargs = local_arguments(args, kwargs)
    return func(*local_args, **local_kwargs)


def _on_wrapper(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A question that the wrapper's own metadata answers."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_METADATA_NAMES = (
    "is_floating_point is_complex is_contiguous is_signed is_pinned is_shared is_inference is_conj is_neg is_coalesced "
    "element_size storage_offset get_device numel nelement ndimension dense_dim sparse_dim is_set_to is_same_size "
    "has_names _is_view is_distributed"
).split()
_METADATA_PROPERTIES = (
    "is_sparse is_sparse_csr is_cpu is_cuda is_meta is_quantized is_mkldnn is_xpu is_mps is_nested itemsize nbytes names "
    "output_nr is_npu is_mtia is_ipu is_vulkan is_xla is_maia"
).split()


def _metadata_functions() -> set[Any]:
    found = {getattr(owner, name) for name in _METADATA_NAMES for owner in (torch, torch.Tensor) if hasattr(owner, name)}
    for name in _METADATA_PROPERTIES:
        descriptor = getattr(torch.Tensor, name, None)
        if hasattr(descriptor, "__get__"):
            found.add(descriptor.__get__)  # type: ignore[union-attr]
    return found


_METADATA = _metadata_functions()
_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.autograd.backward: lambda func, args, kwargs: autograd_bridge.backward(*args, **kwargs),
    torch.autograd.grad: lambda func, args, kwargs: autograd_bridge.grad(*args, **kwargs),
    torch.Tensor._version.__get__: lambda func, args, kwargs: args[0]._resolve()._version,  # type: ignore[attr-defined]
    torch.Tensor._base.__get__: lambda func, args, kwargs: args[0]._base_dtensor,  # type: ignore[attr-defined]
    torch.Tensor._backward_hooks.__get__: lambda func, args, kwargs: None,  # type: ignore[attr-defined]
    torch.Tensor.type: lambda func, args, kwargs: _type(*args, **kwargs),
}


def _type(tensor: DTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        return tensor._local.type()
    return tensor.to(dtype if isinstance(dtype, torch.dtype) else torch.empty(0).type(dtype).dtype)


def _special(func: Callable[..., Any]) -> Callable[..., Any] | None:
    try:
        if func in _METADATA:
            return _on_wrapper
        return _SPECIAL.get(func)
    except TypeError:  # unhashable
        return None


from hyper_parallel.dtensor import DTensor, remembered, wrap  # noqa: E402 - DTensor needs the dispatcher

_make_wrapper = torch.Tensor._make_wrapper_subclass
