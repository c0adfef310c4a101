"""Conversions of dtype and device: ``to``, ``float``, ``type_as``, ``cpu`` and so on.

A pending sum stays pending from float to float, where a cast is linear up to rounding, and is reduced before a cast to
integers or bool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import DTensor
from hyper_parallel.errors import RedistributionError
from hyper_parallel.rules import FunctionOp, OpSummary, as_stated, casts_by_term, local_of, state, wrap


class Cast(FunctionOp):
    """Any function of one tensor that changes at most its dtype and device."""

    summary = OpSummary(
        "every dim",
        pending="passes from float to float, each term rounded; reduced before it becomes whole numbers",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor, args, kwargs = _without_other(args, kwargs)
        if not isinstance(tensor, DTensor):  # only the other tensor, of which the dtype was read, is distributed
            return torch.Tensor.to(tensor, *args, **kwargs)
        if func is torch.Tensor.type_as:
            func = torch.Tensor.to
        spec = tensor.spec
        if spec.layout.is_partial():
            unordered = {name: value for name, value in kwargs.items() if name != "memory_format"}
            dtype = func(torch.empty(0, dtype=spec.dtype), *args, **unordered).dtype
            if not casts_by_term(spec.dtype, dtype):
                if state.mode.policy == "strict":
                    raise RedistributionError(
                        f"{func.__name__}: a pending reduction ({spec.layout}) cannot be cast to {dtype}; "
                        "call reduce_partial() first",
                        op_name=func.__name__,
                        layouts=[spec.layout],
                    )
                tensor = tensor.reduce_partial()
                spec = tensor.spec
        local = local_of(tensor)
        out = func(local, *args, **kwargs)
        asked = kwargs.get("memory_format", torch.preserve_format)
        if asked is torch.preserve_format:
            if out is local:
                return tensor
            stride = spec.dense_stride
        else:
            # Whether it is a copy is decided for the whole, equally on all ranks: a piece of one element has any order.
            whole = spec.meta.to(spec.dtype, memory_format=asked)
            if whole is spec.meta and not _is_copy(func, local, args, kwargs):
                return tensor
            stride = whole.stride() if whole is not spec.meta else torch.empty_like(whole, memory_format=asked).stride()
            out = out.clone() if out is local else out
        changed = spec.replace(dtype=out.dtype, stride=stride)
        return wrap(out if stride == spec.stride else as_stated(out, changed), changed)


def _is_copy(func: Callable[..., Any], local: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call copies whatever the memory format: for another dtype or device, or because it is told to."""
    stand_in = local.detach().new_empty(0)
    rest = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return func(stand_in, *args, **rest) is not stand_in


def _without_other(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The tensor that is cast, and the arguments with another tensor replaced by its dtype and device."""
    kwargs = dict(kwargs)
    tensor, rest = args[0], list(args[1:])
    other = kwargs.pop("other", None)
    if other is None and rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    if other is not None:
        rest = [other.device, other.dtype, *rest]
    return tensor, tuple(rest), kwargs
