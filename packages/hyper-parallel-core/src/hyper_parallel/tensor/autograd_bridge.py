"""Where DTensors meet PyTorch's C++ autograd.

The graph lives on local tensors. C++ code that works on the wrappers themselves (``autograd.Function.apply``, module
backward hooks, reentrant checkpoint) gives an output *wrapper* a C++ node; the first time such an output is used, that
node is joined to the local graph (:mod:`hyper_parallel.tensor.autograd_graph`), so that no gradient is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hyper_parallel import _wiring, torch_compat
from hyper_parallel import tensor as _folder  # whose other modules need this one
from hyper_parallel.comm.redistribute import has_other_reductions
from hyper_parallel.context import redistribute_policy
from hyper_parallel.sharding.placements import is_partial
from hyper_parallel.sharding.spec import contiguous_stride, gradient_spec, make_spec
from hyper_parallel.tensor import dtensor
from hyper_parallel.tensor.autograd_graph import joined, same_as
from hyper_parallel.tensor.below_python import instead
from hyper_parallel.tensor.raw_memory import inside_of

if TYPE_CHECKING:
    from hyper_parallel.comm.steps import Pending
    from hyper_parallel.sharding.spec import Spec
    from hyper_parallel.tensor.dtensor import DTensor
    from hyper_parallel.tensor.redistribute_cache import RememberedForm

_Tensor: Any = torch.Tensor  # its properties are descriptors, which type checkers take for their values
_grad_fn = _Tensor.grad_fn.__get__
_requires_grad = _Tensor.requires_grad.__get__
_get_output_nr = _Tensor.output_nr.__get__
_set_requires_grad = torch.Tensor.requires_grad_


class _Mark:
    """Marks a DTensor whose wrapper may have a C++ node: it was made with gradients off, as all outputs of an
    ``autograd.Function`` are. ``writes`` counts the in-place writes with gradients that were done before."""

    __slots__ = ("writes",)

    def __init__(self, writes: int) -> None:
        self.writes = writes


class Marks:
    """``now`` is the mark of a DTensor made with gradients off."""

    now = _Mark(0)


_JOINED = _Mark(-1)  # has a C++ node, which is joined to the local graph


class InFlight:
    """Marks a DTensor whose collective is still running."""

    form: RememberedForm | None = None  # that is remembered for another tensor

    def __init__(self, pending: Pending, mark: _Mark | None) -> None:
        self.pending, self.mark = pending, mark


def wrapper_grad_fn(tensor: DTensor) -> Any:
    """The C++ node of the wrapper itself."""
    with torch_compat.DisableTorchFunction():
        return _grad_fn(tensor)


def wrapper_requires_grad(tensor: DTensor) -> bool:
    """The C++ flag of the wrapper itself."""
    with torch_compat.DisableTorchFunction():
        return bool(_requires_grad(tensor))


def _output_nr(tensor: DTensor) -> int:
    with torch_compat.DisableTorchFunction():
        return int(_get_output_nr(tensor))


def set_wrapper_requires_grad(tensor: DTensor, flag: bool) -> None:
    """Bring the wrapper's C++ flag up to the local tensor's."""
    with torch_compat.DisableTorchFunction():
        if _grad_fn(tensor) is None:
            _set_requires_grad(tensor, flag)


def renew_wrapper(tensor: DTensor, spec: Spec, device: torch.device, requires_grad: bool) -> None:
    """Give a DTensor a wrapper with this metadata and no C++ node; the Python object stays.

    Raises:
        RuntimeError: when the C++ graph of an ``autograd.Function`` holds the old wrapper.
    """
    fresh = torch_compat.make_wrapper_subclass(
        type(tensor), spec.shape, spec.stride, dtype=spec.dtype, device=device, requires_grad=requires_grad
    )
    try:
        torch_compat.refuse_memory(fresh)
        # Not torch.utils.swap_tensors: it swaps the attributes too, and refuses tensors with weak references.
        torch_compat.swap_tensor_impl(tensor, fresh)
    except RuntimeError as error:
        raise RuntimeError(
            "a DTensor cannot be changed while the graph of an autograd.Function that it went into is alive; clone() "
            "it first, or drop the function's result"
        ) from error


def forget_node(tensor: DTensor) -> None:
    """Make a wrapper a leaf for C++, with the history that its local tensor has."""
    if tensor._pending is not None and wrapper_grad_fn(tensor) is not None:
        renew_wrapper(tensor, tensor._spec, tensor._local.device, tensor._local.requires_grad)
        tensor._pending = None


def settle(tensor: DTensor) -> None:
    """Do what has to happen before the local tensor is used."""
    mark = tensor._pending
    if mark is _JOINED:
        return
    if isinstance(mark, InFlight):
        mark.pending.wait()
        if tensor._origin is not None:  # completing the result counted as a write to it
            tensor._origin.completed(tensor._local)
        if mark.form is not None:
            mark.form.completed()
        mark = tensor._pending = mark.mark
    if mark is not None and torch.is_grad_enabled() and wrapper_requires_grad(tensor):
        _join(tensor, mark)


def _join(tensor: DTensor, mark: _Mark) -> None:
    """Connect the local tensor to what C++ says the wrapper was made from."""
    node = wrapper_grad_fn(tensor)
    if node is not None:
        if has_other_reductions(tensor.layout):
            # It was made without gradients, and needs one after all (the result of a reentrant checkpoint).
            _folder.in_place.carry_out(tensor)
        tensor._local = joined(
            tensor._local, tensor._spec, node, _output_nr(tensor), lambda leaf: leaf._written_at > mark.writes
        )
        tensor._pending = _JOINED
    elif not tensor._local.requires_grad:
        # C++ unpacked it from a saved tensor with hooks: a copy, whose gradient goes to the tensor that was saved.
        with torch_compat.DisableTorchFunction():
            accumulate: Any = get_gradient_edge(tensor).node
            saved = accumulate.variable
        tensor._local = tensor._local.requires_grad_() if saved is tensor else same_as(tensor._local, saved._resolve())
        tensor._pending = None


def before_write(tensor: DTensor) -> None:
    """Keep the C++ graph between wrappers right when a local tensor is written in place."""
    if not torch.is_grad_enabled():
        if tensor._pending is None and not tensor._local.requires_grad:
            tensor._pending = Marks.now  # an autograd.Function may mark it dirty
        return
    if tensor._pending is not None and wrapper_grad_fn(tensor) is not None:
        # A later autograd.Function must not find the node from before the write.
        settle(tensor)
        forget_node(tensor)
    if wrapper_requires_grad(tensor):
        Marks.now = _Mark(Marks.now.writes + 1)
        tensor._written_at = Marks.now.writes


# -- backward() and grad() over DTensors --------------------------------------------------------------------------


def _roots(tensors: Sequence[Any], grads: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
    """Local roots and the local gradients to start from; a global scalar's seed of one counts once over all ranks."""
    given = [None] * len(tensors) if grads is None else list(grads)
    roots, seeds = [], []
    for tensor, grad in zip(tensors, given, strict=True):
        if isinstance(tensor, dtensor.DTensor):
            tensor = _only_sums_pending(tensor)
        roots.append(with_history(tensor) if isinstance(tensor, dtensor.DTensor) else tensor)
        seeds.append(_seed(tensor, grad) if isinstance(tensor, dtensor.DTensor) else grad)
    return roots, seeds


def _only_sums_pending(tensor: DTensor) -> DTensor:
    """A pending average, maximum and so on is reduced before a gradient enters it; only sums carry gradients."""
    if not tensor.layout.is_partial() or all(not is_partial(p) or p.reduce_op == "sum" for p in tensor.placements):
        return tensor
    with torch.enable_grad():
        return tensor.reduce_partial()


def with_history(tensor: DTensor) -> torch.Tensor:
    """The local tensor, joined to the local graph even when gradients are off, as they are inside a backward."""
    if tensor._pending is None:
        return tensor._local
    with torch.enable_grad():
        return tensor._resolve()


def gradient_paths(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The local tensors of which at least one gets a gradient when the tensor does, upstream last: its own, and what
    it was redistributed from, where a later use of it may start. For hooks that only want to know when; nothing is
    waited for and no fusion is given up."""
    if not isinstance(tensor, dtensor.DTensor):
        return (tensor,)
    local = tensor._local if isinstance(tensor._pending, InFlight) else tensor._resolve()
    return (local,) if tensor._origin is None else (local, tensor._origin.local)


def _seed(tensor: DTensor, grad: Any) -> torch.Tensor:
    spec = tensor._spec
    local = tensor._resolve()
    wanted = gradient_spec(spec, local.dtype)
    if not isinstance(grad, dtensor.DTensor):
        if grad is None:
            if tensor.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            grad = torch.ones(tuple(spec.shape), dtype=spec.dtype, device=local.device)
        elif grad.shape != spec.shape:
            raise RuntimeError(f"the gradient has shape {tuple(grad.shape)}, the tensor {tuple(spec.shape)}")
        stride = contiguous_stride(spec.shape)
        grad = dtensor.wrap(grad, make_spec(spec.layout.replicated(), spec.shape, stride, grad.dtype))
    return _folder.redistribute_cache.convert(grad, wanted)._resolve()


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, (torch.Tensor, GradientEdge)):
        return (value,)
    return tuple(value.values() if isinstance(value, dict) else value)


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
        wanted = [with_history(t) if isinstance(t, dtensor.DTensor) else t for t in _as_tuple(inputs)]
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
    if is_grads_batched:
        raise NotImplementedError("autograd.grad of DTensors has no is_grads_batched; call it once per gradient")
    sources = _as_tuple(inputs)
    roots, seeds = _roots(_as_tuple(outputs), None if grad_outputs is None else _as_tuple(grad_outputs))
    locals_ = [with_history(t) if isinstance(t, dtensor.DTensor) else t for t in sources]
    results = torch.autograd.grad(
        roots,
        locals_,
        seeds,
        retain_graph,
        create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    return tuple(
        dtensor.wrap_gradient(g, t._spec) if isinstance(t, dtensor.DTensor) and g is not None else g
        for t, g in zip(sources, results, strict=True)
    )


# -- the guard ----------------------------------------------------------------------------------------------------

_aten = torch.ops.aten
_ALIASES = (_aten.alias.default, _aten.detach.default)


def guard(func: Any, args: Any, kwargs: Any) -> Any:
    """C++ code met a wrapper. What autograd itself does to tensors and gradients is done here; anything else raises."""
    tensor = args[0]
    if func in _ALIASES or (func is _aten.view.default and tuple(args[1]) == tuple(tensor.shape)):
        with torch.no_grad():
            return dtensor.wrap(tensor._local.detach(), tensor._spec)
    if func is _aten.zeros_like.default:  # for an output that got no gradient
        with torch.no_grad():
            return dtensor.wrap(torch.zeros_like(tensor._local), tensor._spec)
    if func is _aten._local_scalar_dense.default:  # a number for a function that wants one: torch.arange(n)
        return _wiring.dispatch(torch.Tensor.item, (tensor,), {})
    if func is _aten._to_copy.default and kwargs.keys() <= {"dtype", "device"}:
        return _wiring.dispatch(
            torch.Tensor.to, args, kwargs
        )  # a gradient in another dtype than its tensor, torch.tensor(x)
    if func is _aten.set_.source_Tensor and isinstance(args[1], dtensor.DTensor) and args[1]._spec is tensor._spec:
        with torch.no_grad():  # torch.nn.utils.parametrize puts the original value back so
            tensor.data = args[1]
        return tensor
    if (
        func is _aten.add.Tensor and len(args) == 2 and not kwargs and all(isinstance(a, dtensor.DTensor) for a in args)
    ):  # gradients
        with redistribute_policy("auto"):
            return _wiring.dispatch(torch.add, args, {})
    raise RuntimeError(
        f"{func} reached a DTensor below PyTorch's Python layer, where its layout is not known. {instead()}"
        + inside_of()
    )
