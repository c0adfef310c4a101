"""Whole tensors out of a sharded state dict and into one, one tensor at a time.

Out: every shard travels towards rank 0, which alone ever holds a whole tensor. In: rank 0 hands out the shards, or
each rank cuts its own from a whole that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from hyper_parallel import torch_compat
from hyper_parallel.comm import primitives as comm
from hyper_parallel.tensor.distribute import distribute_tensor, gather_to_first
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.utils.structures import tensors_of

__all__ = ["Announced", "announced", "delivered", "full_tensors", "placed"]


def full_tensors(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``(name, whole tensor)`` of one entry after the other on rank 0, ``(name, None)`` on the others.

    All ranks go through the whole iterator. Rank 0 holds one whole tensor besides what the caller keeps, and the pieces
    of which it was made; another rank at most what it passes on. Entries that are no DTensors come as they are.

    Raises:
        ValueError: a DTensor is on a mesh that does not begin with rank 0, or is a pending reduction.
    """
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            _check_begins_with_rank_0(value, name)
            value = gather_to_first(value)
        yield name, value if rank() == 0 else None


def rank() -> int:
    """This process among all; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def delivered(state: Any, options: StateDictOptions) -> Any:
    """A nested state dict as the options ask for it: whole or sharded tensors, in host memory or where they are; whole
    ones in host memory on rank 0 only, {} elsewhere. Whole ones are copies, which training on does not change."""
    to_rank_0 = options.full_state_dict and options.cpu_offload
    if to_rank_0 and rank() != 0:
        for tensor in tensors_of(state):
            if isinstance(tensor, DTensor):
                _whole(tensor, to_rank_0)  # rank 0 is waiting for it
        return {}
    return _mapped(state, lambda tensor: _delivered_tensor(tensor, options, to_rank_0))


def _delivered_tensor(tensor: torch.Tensor, options: StateDictOptions, to_rank_0: bool) -> torch.Tensor:
    if not options.full_state_dict:
        return tensor.cpu() if options.cpu_offload else tensor
    own = tensor._resolve() if isinstance(tensor, DTensor) else tensor
    whole = _whole(tensor, to_rank_0) if isinstance(tensor, DTensor) else tensor.detach()
    if options.cpu_offload:
        whole = whole.cpu()
    same_memory = whole.device == own.device and whole.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
    return whole.clone() if same_memory else whole


def _whole(tensor: DTensor, to_rank_0: bool) -> Any:
    if to_rank_0:
        ((_, value),) = full_tensors({"": tensor})
        return value
    on_mesh: Any = tensor.to(tensor.layout.info.device_type)  # shards may be kept in host memory
    return on_mesh.full_tensor()


def _mapped(state: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A nested state dict of the same kinds with its tensors changed."""
    if isinstance(state, dict):
        return type(state)({name: _mapped(value, change) for name, value in state.items()})
    if isinstance(state, (list, tuple)):
        return type(state)([_mapped(value, change) for value in state])
    return change(state) if isinstance(state, torch.Tensor) else state


class Announced(NamedTuple):
    """A whole tensor that rank 0 has and this rank does not."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


def announced(state: Any) -> Any:
    """Rank 0's state dict on every rank, whose tensors the others have as :class:`Announced` only.

    All ranks call it; what other ranks than 0 pass does not count.

    Raises:
        TypeError: on every rank, when rank 0 has shards.
    """
    box: list[Any] = [None]
    if rank() == 0:
        try:
            box = [_mapped(state, _announcement)]
        except TypeError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], TypeError):
        raise box[0]
    return state if rank() == 0 else box[0]


def _announcement(tensor: torch.Tensor) -> Announced:
    if isinstance(tensor, DTensor):
        raise TypeError(
            f"broadcast_from_rank0 takes whole tensors on rank 0, got {tensor.layout}; get them with "
            "StateDictOptions(full_state_dict=True, cpu_offload=True)"
        )
    return Announced(tensor.shape, tensor.dtype, tensor.device.type)


def placed(value: Any, like: Any, name: str, options: StateDictOptions) -> Any:
    """An entry of a given state dict in the form of ``like``, the tensor that it is for.

    Args:
        value: whole tensor, DTensor, :class:`Announced`, dicts and lists of them, or no tensor at all.
        like: tensor of the module or optimizer; None when there is none.
        name: for messages.
        options: whether whole tensors are expected, and who has them.

    Raises:
        TypeError: a whole tensor for a sharded one without ``full_state_dict``.
        ValueError: a DTensor on another mesh than ``like``.
    """
    if isinstance(value, DTensor):
        return _on_layout_of(value, like, name)
    if not isinstance(value, (torch.Tensor, Announced)):
        if isinstance(value, dict):
            return type(value)({key: placed(v, like, f"{name}.{key}", options) for key, v in value.items()})
        if isinstance(value, (list, tuple)):
            return type(value)([placed(v, like, name, options) for v in value])
        return value
    if not isinstance(like, DTensor) or tuple(value.shape) != tuple(like.shape):
        return _received(value) if options.broadcast_from_rank0 else value
    if options.broadcast_from_rank0:
        _check_begins_with_rank_0(like, name)
        if isinstance(value, Announced):
            value = torch.empty((), dtype=value.dtype).expand(value.shape)  # takes no memory
        return distribute_tensor(value.detach(), like.layout, src_data_rank=0)
    assert isinstance(value, torch.Tensor)
    if options.full_state_dict:
        return distribute_tensor(value.detach(), like.layout, src_data_rank=None)
    raise TypeError(
        f"{name}: the state dict holds a whole tensor for one that is sharded, {like.layout}; pass "
        "options=StateDictOptions(full_state_dict=True)"
    )


def _received(value: torch.Tensor | Announced) -> torch.Tensor:
    device = torch_compat.object_device()
    if isinstance(value, Announced):
        tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
    else:
        tensor = value.detach().to(device).contiguous()
    dist.broadcast(comm.movable(tensor), src=0)
    return tensor.to(value.device)


def _on_layout_of(value: DTensor, like: Any, name: str) -> DTensor:
    if not isinstance(like, DTensor) or like.layout is value.layout or like.shape != value.shape:
        return value
    if like.layout.info is not value.layout.info:
        raise ValueError(
            f"{name}: the state dict has it on mesh {value.layout.info!r}, the model on {like.layout.info!r}; save it "
            "and load it: hyper_parallel.checkpoint.save and load"
        )
    return value.redistribute(like.layout)


def _check_begins_with_rank_0(tensor: DTensor, name: str) -> None:
    first = int(tensor.layout.mesh.mesh.flatten()[0])
    if first != 0:
        raise ValueError(
            f"{name}: rank 0 is to send or receive the whole tensor, but its mesh {tensor.layout.info!r} begins with "
            f"rank {first}; use the sharded state dict, or one with full tensors on every rank (cpu_offload=False)"
        )
