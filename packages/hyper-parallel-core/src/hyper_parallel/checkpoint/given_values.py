"""Give a module memory and values, each rank its blocks of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hyper_parallel.checkpoint.deferred.tensor import value_of
from hyper_parallel.checkpoint.deferred.values import blocks_of
from hyper_parallel.checkpoint.model_state import canonical, ties
from hyper_parallel.tensor.dcp_protocol import blocks
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import before_write

__all__ = ["fill", "give_memory", "give_values"]


def give_memory(module: nn.Module, device: torch.device | str) -> None:
    """``module.to_empty(device=device)``, after which tied parameters are still tied."""
    tied = ties(module)
    raw = {canonical(name): name for name, _ in module.named_parameters(remove_duplicate=False)}
    raw |= {canonical(name): name for name, _ in module.named_buffers(remove_duplicate=False)}
    module.to_empty(device=torch.device(device))
    for first, *others in tied:
        owner, _, leaf = raw[first].rpartition(".")
        tensor = getattr(module.get_submodule(owner), leaf)
        for name in others:
            owner, _, leaf = raw[name].rpartition(".")
            setattr(module.get_submodule(owner), leaf, tensor)


def give_values(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Write values into a module that has memory: each rank its blocks, with at most one whole tensor at a time.

    Args:
        module: any; what is sharded in it is a DTensor.
        values: by name, of its parameters and buffers: of :func:`build_on_meta`, or tensors.

    Raises:
        ValueError: the module has a parameter or buffer without a value.
    """
    tensors = {canonical(n): t for n, t in [*module.named_parameters(), *module.named_buffers()]}
    without = [name for name in tensors if name not in values]
    if without:
        raise ValueError(f"no values were given for {', '.join(without[:5])}, and nobody knows how they are made")
    for name, tensor in tensors.items():
        fill(tensor, values[name])


@torch.no_grad()
def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy into a tensor, or a DTensor of which this rank has blocks, what it has of other values."""
    value = value_of(values)
    if not isinstance(target, DTensor):
        target.copy_(value.whole())
        return
    before_write(target)
    local = target._resolve()
    held = [(offsets, sizes, place) for offsets, sizes, place in blocks(target) if sizes.numel()]
    places = [tuple((at, at + n) for at, n in zip(offsets, sizes, strict=True)) for offsets, sizes, _ in held]
    for (_, _, place), part in zip(held, blocks_of(value, places), strict=True):
        local[place].copy_(part)
