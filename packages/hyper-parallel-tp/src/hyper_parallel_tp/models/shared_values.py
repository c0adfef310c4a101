"""One model on all ranks: the values of rank 0."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import DTensor
from hyper_parallel.rules import device_type_of_backend

__all__ = ["share_values"]


def share_values(model: nn.Module) -> None:
    """Send parameters and buffers of rank 0 to all, so that ranks which built the model each for itself, from whatever
    seed, hold shards and copies of one. What is on the meta device has no values yet.

    Raises:
        ValueError: a parameter is sharded already.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise ValueError(f"parallelize: {name} is sharded already; it takes a model as it was built or loaded")
        if tensor.is_meta or not tensor.numel():
            continue
        values = tensor.detach()
        sent = values.to(_device(values)).contiguous()
        dist.broadcast(sent, src=0)
        if sent is not values:
            values.copy_(sent)


def _device(values: torch.Tensor) -> torch.device:
    """Where the process group's backend can send a tensor from."""
    kind = device_type_of_backend()
    return values.device if values.device.type == kind else torch.device(kind)
