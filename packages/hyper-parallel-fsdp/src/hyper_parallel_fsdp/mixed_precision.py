"""The mixed precision policy at a module's boundary: inputs and outputs in the dtypes that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from hyper_parallel.rules import map_structure, torch_compat


def cast_inputs(
    policy: MixedPrecisionPolicy, device: torch.device, is_root: bool, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Floating point inputs in ``param_dtype``; a root's inputs on the device too."""
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    move = is_root and device.type not in ("cpu", "meta")
    if dtype is None and not move:
        return args, kwargs

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if move and tensor.device.type == "cpu":
            tensor = tensor.to(device, non_blocking=True)
        return _as(tensor, dtype)

    return map_values((args, kwargs), change)


def cast_outputs(policy: MixedPrecisionPolicy, output: Any) -> Any:
    """Floating point outputs in ``output_dtype``."""
    if policy.output_dtype is None:
        return output
    return map_values(output, lambda t: _as(t, policy.output_dtype))


def map_values(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Every tensor changed: in what pytree knows, and in dataclasses."""
    return torch_compat.pytree.tree_map(lambda leaf: map_structure(leaf, change), value)


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
