"""Functions that need no rule: questions that the wrapper's own metadata answers, and autograd's entry points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import torch_compat
from hyper_parallel.context import state
from hyper_parallel.dispatch.arguments import local_arguments, on_locals
from hyper_parallel.tensor import autograd_bridge
from hyper_parallel.tensor.distribute import distribute_tensor
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.raw_memory import refusal


def _on_wrapper(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A question that the wrapper's own metadata answers."""
    with torch_compat.DisableTorchFunction():
        return func(*args, **kwargs)


_METADATA_NAMES = (
    "is_floating_point is_complex is_contiguous is_signed is_pinned is_shared is_inference is_conj is_neg is_coalesced "
    "element_size storage_offset get_device dim dim_order size stride numel nelement ndimension dense_dim sparse_dim "
    "has_names _is_view is_distributed __dir__ result_type"
).split()
_METADATA_PROPERTIES = (
    "is_sparse is_sparse_csr is_cpu is_cuda is_meta is_quantized is_mkldnn is_xpu is_mps is_nested itemsize nbytes "
    "names output_nr is_npu is_mtia is_ipu is_vulkan is_xla is_maia name volatile grad_dtype"
).split()


def _metadata_functions() -> set[Any]:
    found = {
        getattr(owner, name) for name in _METADATA_NAMES for owner in (torch, torch.Tensor) if hasattr(owner, name)
    }
    for name in _METADATA_PROPERTIES:
        descriptor = getattr(torch.Tensor, name, None)
        if hasattr(descriptor, "__get__"):
            found.add(descriptor.__get__)  # type: ignore[union-attr]
    return found


_METADATA = _metadata_functions()
_Tensor: Any = torch.Tensor  # its properties are descriptors, which type checkers take for their values
_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.autograd.backward: lambda func, args, kwargs: autograd_bridge.backward(*args, **kwargs),
    torch.autograd.grad: lambda func, args, kwargs: autograd_bridge.grad(*args, **kwargs),
    _Tensor._version.__get__: lambda func, args, kwargs: args[0]._resolve()._version,
    _Tensor._base.__get__: lambda func, args, kwargs: args[0]._base_dtensor,
    _Tensor._backward_hooks.__get__: lambda func, args, kwargs: None,
    _Tensor._backward_hooks.__set__: _on_wrapper,
    torch.Tensor.module_load: lambda func, args, kwargs: _module_load(*args, **kwargs),
    torch.eye: lambda func, args, kwargs: _eye(*args, **kwargs),
    torch.Tensor.type: lambda func, args, kwargs: _type(*args, **kwargs),
    torch.is_same_size: lambda func, args, kwargs: args[0].shape == args[1].shape,
    torch.Tensor.is_same_size: lambda func, args, kwargs: args[0].shape == args[1].shape,
    # Module.to() asks whether a parameter's .data may be set to the converted one.
    torch_compat.has_compatible_copy_type: lambda func, args, kwargs: func(*local_arguments(args, kwargs)[0]),
}


def _module_load(tensor: torch.Tensor, other: torch.Tensor, assign: bool = False) -> torch.Tensor:
    return other.detach() if assign else tensor.detach().copy_(other)


def _eye(*sizes: Any, out: DTensor, **options: Any) -> DTensor:
    """``torch.eye(*x.shape, out=x)``, as ``nn.init.eye_`` writes it; every rank makes the whole and takes its part."""
    whole = torch.eye(*sizes, dtype=out.dtype, device=out.device)
    return out.copy_(distribute_tensor(whole, out.layout, src_data_rank=None))  # type: ignore[return-value]


def _without_memory(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A question about memory, which a DTensor has none of: its rank's piece has."""
    if state.mode.skip:
        return on_locals(func, args, kwargs)
    name = getattr(func, "__name__", "")
    raise refusal("__cuda_array_interface__" if name == "__get__" else f"{name}(...)")


_SPECIAL[_Tensor.__cuda_array_interface__.__get__] = _without_memory
_SPECIAL.update(
    dict.fromkeys(
        (
            getattr(torch.Tensor, name)
            for name in "storage untyped_storage storage_type share_memory_ is_set_to resize_ resize_as_ pin_memory "
            "record_stream __dlpack__ __dlpack_device__".split()
        ),
        _without_memory,
    )
)


def _type(tensor: DTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        return tensor._local.type()
    return tensor.to(dtype if isinstance(dtype, torch.dtype) else torch.empty(0).type(dtype).dtype)


def _own_method(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """DTensor's own method where ``func`` is torch's or torch.Tensor's of that name: ``torch.detach(x)``."""
    name = getattr(func, "__name__", "")
    own = getattr(DTensor, name, None)
    theirs = (getattr(torch, name, None), getattr(torch.Tensor, name, None))
    if own is None or own in theirs or func not in theirs:
        return None
    return lambda _, args, kwargs: own(*args, **kwargs)


def handler_of(func: Callable[..., Any]) -> Callable[..., Any] | None:
    try:
        if func in _METADATA:
            return _on_wrapper
        return _SPECIAL.get(func) or _own_method(func)
    except TypeError:  # unhashable
        return None
