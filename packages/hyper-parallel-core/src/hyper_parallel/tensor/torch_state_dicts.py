"""Make ``StateDictOptions(full_state_dict=True)`` of ``torch.distributed.checkpoint.state_dict`` know our DTensors.

PyTorch's helpers ask ``isinstance(value, torch.distributed.tensor.DTensor)`` and pass everything else through: a "full"
state dict would silently hold shards. They have no hook to add a class, so three of their functions are wrapped, and
that by which ``async_save`` copies a tensor to the host. (Read in PyTorch 2.13.)
:mod:`hyper_parallel.checkpoint` has the same helpers in bounded memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hyper_parallel.tensor.distribute import distribute_tensor, gather_to_first
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.torch_compat import change_torch
from hyper_parallel.utils.import_hooks import when_imported


def install() -> None:
    """Wrap the functions, where they are defined and where they were imported to."""
    functions = {
        "_gather_state_dict": _gathering,
        "_distribute_state_dict": _placing,
        "_broadcast_state_dict": _placing,
    }
    change_torch(DTensor, functions)
    when_imported("torch.distributed.checkpoint._state_dict_stager", _stage_dtensors)


def _stage_dtensors(module: Any) -> None:
    """``async_save`` copies a state dict to the host first, tensor by tensor, by their memory."""
    stager: Any = module.StateDictStager
    offload = stager._offload_tensor

    @functools.wraps(offload)
    def offload_tensor(self: Any, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return offload(self, x, memo, non_blocking=non_blocking)
        local = x._resolve().detach()
        memo[id(x)] = staged = wrap(offload(self, local, memo, non_blocking=non_blocking), x._spec)
        memo.setdefault(id(memo), []).append(local)  # as copy.deepcopy: what is known by its id has to live as long
        return staged

    stager._offload_tensor = offload_tensor


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
