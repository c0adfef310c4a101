"""The tensor objects of DTensors: no data, the global shape, and around them the local tensor and its spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hyper_parallel.spec import Spec

__all__ = ["new_wrapper"]


def _new_wrapper(cls: type, local: torch.Tensor, spec: Spec, requires_grad: bool) -> Any:
    """A tensor of class ``cls`` without data: the spec's global shape and stride, the local tensor's dtype and device.

    C++ code that meets it ends in ``cls.__torch_dispatch__``, so it cannot take the piece for the whole.
    """
    meta = spec.tensor_meta
    result: Any = torch.Tensor._make_wrapper_subclass(
        cls, meta.shape, meta.stride, dtype=local.dtype, device=local.device, requires_grad=requires_grad
    )
    result._local_tensor, result._spec = local, spec
    return result


# The constructor that PyTorch has for its own DTensor does the same in C++, in half the time.
new_wrapper = getattr(torch.Tensor, "_dtensor__new__", _new_wrapper)
