"""Where DTensors meet PyTorch's C++ autograd.

The graph lives on local tensors. C++ code that works on the wrappers themselves (``autograd.Function.apply``, module
backward hooks, reentrant checkpoint) gives an output *wrapper* a C++ node; the first time such an output is used, that
node is joined to the local graph, so that no gradient is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import _engine_run_backward

if TYPE_CHECKING:
    from hyper_parallel.dtensor import DTensor
    from hyper_parallel.transition import Pending

_grad_fn = torch.Tensor.grad_fn.__get__  # type: ignore[attr-defined]
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_set_requires_grad = torch.Tensor.requires_grad_
_view_as = torch.Tensor.view_as


class _MadeWithoutGrad:
    """Marks a DTensor made with gradients off: only such a one can have got a C++ node afterwards."""


MADE_WITHOUT_GRAD = _MadeWithoutGrad()


class InFlight:
    """Marks a DTensor whose collective is still running."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending


def wrapper_grad_fn(tensor: DTensor) -> Any:
    """The C++ node of the wrapper itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return _grad_fn(tensor)


def wrapper_requires_grad(tensor: DTensor) -> bool:
    """The C++ flag of the wrapper itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(_requires_grad(tensor))


def set_wrapper_requires_grad(tensor: DTensor, flag: bool) -> None:
    """Bring the wrapper's C++ flag up to the local tensor's."""
    with torch._C.DisableTorchFunctionSubclass():
        if _grad_fn(tensor) is None:
            _set_requires_grad(tensor, flag)


def settle(tensor: DTensor) -> None:
    """Do what has to happen before the local tensor is used."""
    pending = tensor._pending
    if isinstance(pending, InFlight):
        tensor._pending = None
        pending.pending.wait()
    elif torch.is_grad_enabled():
        if not tensor._local.requires_grad and wrapper_grad_fn(tensor) is not None:
            _join(tensor)
            tensor._pending = None


def _leaves(node: Any) -> list[DTensor]:
    """The wrappers at which the C++ graph above ``node`` ends."""
    found: dict[int, DTensor] = {}
    seen, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        variable = getattr(current, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.setdefault(id(variable), variable)  # type: ignore[arg-type]
        stack.extend(parent for parent, _ in current.next_functions)
    return list(found.values())


def _join(tensor: DTensor) -> None:
    from hyper_parallel.dtensor import DTensor, wrap

    with torch.no_grad():
        output = wrap(tensor._local, tensor._spec)  # for the shape of messages; the C++ node stays on `tensor`
    node = wrapper_grad_fn(tensor)
    leaves = _leaves(node)
    locals_ = [leaf._resolve() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    tensor._local = _Join.apply(_Joined(_alias(tensor), output._spec, leaves), tensor._local.detach(), *locals_)


def _alias(tensor: DTensor) -> Any:
    """Another wrapper on the same C++ graph: the node may not keep the wrapper that will hold it (a cycle)."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        return _view_as(tensor, tensor)


class _Joined:
    def __init__(self, root: Any, spec: Any, leaves: list[Any]) -> None:
        self.root, self.spec, self.leaves = root, spec, leaves


class _Join(torch.autograd.Function):
    """A wrapper's C++ graph as one node of the local graph."""

    @staticmethod
    def forward(ctx: Any, joined: _Joined, local: torch.Tensor, *leaf_locals: torch.Tensor) -> torch.Tensor:
        ctx.joined = joined
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        from hyper_parallel.dtensor import DTensor, convert, gradient_spec, wrap

        joined = ctx.joined
        seed = wrap(grad, gradient_spec(joined.spec, grad))
        grads = _engine_run_backward(
            (joined.root,), (seed,), True, torch.is_grad_enabled(), tuple(joined.leaves), allow_unreachable=True, accumulate_grad=False
        )
        back = []
        for leaf, result in zip(joined.leaves, grads, strict=True):
            if isinstance(leaf, DTensor) and result is not None:
                result = convert(result, gradient_spec(leaf._spec, result._resolve()))._resolve()
            back.append(result)
        return None, None, *back


# -- backward() and grad() over DTensors --------------------------------------------------------------------------


def _roots(tensors: Sequence[Any], grads: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
    """Local roots and the local gradients to start from; a global scalar's seed of one counts once over all ranks."""
    from hyper_parallel.dtensor import DTensor

    given = [None] * len(tensors) if grads is None else list(grads)
    roots, seeds = [], []
    for tensor, grad in zip(tensors, given, strict=True):
        roots.append(tensor._resolve() if isinstance(tensor, DTensor) else tensor)
        seeds.append(_seed(tensor, grad) if isinstance(tensor, DTensor) else grad)
    return roots, seeds


def _seed(tensor: DTensor, grad: Any) -> torch.Tensor:
    from hyper_parallel.dtensor import DTensor, convert, gradient_spec, wrap
    from hyper_parallel.spec import contiguous_stride, make_spec

    spec = tensor._spec
    local = tensor._resolve()
    wanted = gradient_spec(spec, local)
    if not isinstance(grad, DTensor):
        if grad is None:
            if tensor.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            grad = torch.ones(tuple(spec.shape), dtype=spec.dtype, device=local.device)
        elif grad.shape != spec.shape:
            raise RuntimeError(f"the gradient has shape {tuple(grad.shape)}, the tensor {tuple(spec.shape)}")
        stride = contiguous_stride(spec.shape)
        grad = wrap(grad, make_spec(spec.layout.replicated(), spec.shape, stride, grad.dtype))
    return convert(grad, wanted)._resolve()


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    **unknown: Any,
) -> None:
    """``torch.autograd.backward`` for DTensors."""
    if unknown:
        raise TypeError(f"backward of DTensors does not take {sorted(unknown)}")
    roots, seeds = _roots(_as_tuple(tensors), None if grad_tensors is None else _as_tuple(grad_tensors))
    wanted = None
    if inputs is not None:
        wanted = [t._local if hasattr(t, "_local") else t for t in _as_tuple(inputs)]
    torch.autograd.backward(roots, seeds, retain_graph, create_graph, inputs=wanted)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """``torch.autograd.grad`` for DTensors: the gradients come back as DTensors."""
    from hyper_parallel.dtensor import DTensor, gradient_spec, wrap

    if is_grads_batched:
        raise NotImplementedError("autograd.grad of DTensors has no is_grads_batched; call it once per gradient")
    sources = _as_tuple(inputs)
    roots, seeds = _roots(_as_tuple(outputs), None if grad_outputs is None else _as_tuple(grad_outputs))
    locals_ = [t._resolve() if isinstance(t, DTensor) else t for t in sources]
    results = torch.autograd.grad(
        roots, locals_, seeds, retain_graph, create_graph, allow_unused=allow_unused, materialize_grads=materialize_grads
    )
    return tuple(
        wrap(g, gradient_spec(t._spec, g)) if isinstance(t, DTensor) and g is not None else g
        for t, g in zip(sources, results, strict=True)
    )


# -- the guard ----------------------------------------------------------------------------------------------------

_aten = torch.ops.aten


def guard(func: Any, args: Any, kwargs: Any) -> Any:
    """C++ code met a wrapper. Autograd's own bookkeeping is done on the local tensor; anything else raises."""
    from hyper_parallel.dispatcher import dispatch
    from hyper_parallel.dtensor import wrap

    if func in (_aten.alias.default, _aten.detach.default, _aten.view.default):
        tensor = args[0]
        if func is not _aten.view.default or tuple(args[1]) == tuple(tensor.shape):
            with torch.no_grad():
                return wrap(tensor._local.detach(), tensor._spec)
    if func is _aten.add.Tensor and not kwargs:  # gradients of one wrapper, added by the engine
        return dispatch(torch.add, args, {})
    raise RuntimeError(
        f"{func} reached a DTensor below PyTorch's Python layer, where its layout is not known. Call the operator through "
        "torch (torch.*, Tensor methods, torch.ops.*), or pass to_local() if the code is meant for this rank's piece"
    )
