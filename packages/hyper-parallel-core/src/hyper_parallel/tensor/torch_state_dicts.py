"""Make ``StateDictOptions(full_state_dict=True)`` of ``torch.distributed.checkpoint.state_dict`` know our DTensors.

PyTorch's helpers ask ``isinstance(value, torch.distributed.tensor.DTensor)`` and pass everything else through: a "full"
state dict would silently hold shards. They have no hook to add a class, so three of their functions are wrapped.
:mod:`hyper_parallel.checkpoint` has the same helpers in bounded memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hyper_parallel.tensor import untraced
from hyper_parallel.tensor.distribute import distribute_tensor, gather_to_first
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.torch_compat import change_torch


def install() -> None:
    """Wrap the functions, and let optimizers know the class; called when the first mesh is used."""
    functions = {
        "_gather_state_dict": _gathering,
        "_distribute_state_dict": _placing,
        "_broadcast_state_dict": _placing,
    }
    change_torch(DTensor, functions)
    untraced.install(DTensor)


def _gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def wrapper(
        state_dict: dict[str, Any], *, cpu_offload: bool = False, ranks_only: tuple[int, ...] = (), **options: Any
    ) -> Any:
        def whole(tensor: DTensor) -> torch.Tensor | None:
            value = gather_to_first(tensor.reduce_partial()) if ranks_only == (0,) else tensor.full_tensor()
            return value.cpu() if cpu_offload and value is not None else value

        changed = _map_dtensors(state_dict, whole)
        return gather(changed, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)

    return wrapper


def _placing(fill: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fill)
    def wrapper(full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        ours = {name: value.layout for name, value in local_state_dict.items() if isinstance(value, DTensor)}
        fill(full_state_dict, local_state_dict, *args, **options)
        for name, layout in ours.items():
            value = local_state_dict.get(name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                local_state_dict[name] = distribute_tensor(value.detach(), layout, src_data_rank=None)

    return wrapper


def _map_dtensors(value: Any, change: Callable[[DTensor], Any]) -> Any:
    if isinstance(value, DTensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_dtensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_map_dtensors(item, change) for item in value])
    return value
