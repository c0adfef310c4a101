"""From a DTensor to this rank's piece, where a style hands out plain tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Layout, Placement
from hyper_parallel.rules import MeshInfo, is_replicate, is_shard, local_of, mesh_info

GradPlacements = Sequence[Placement] | None


def local_piece(value: Any, module: nn.Module, mesh: DeviceMesh, grad_placements: GradPlacements = None) -> Any:
    """This rank's piece of a DTensor on the style's mesh, as a plain tensor; anything else as it is.

    A DTensor on a larger mesh, such as that of a batch laid out over data axes, stays one: of its plain piece nobody
    would know that it is a part of the batch.

    Args:
        value: what the style hands out.
        module: whose output it is.
        mesh: the style's.
        grad_placements: as of :meth:`DTensor.to_local`.

    Raises:
        ValueError: the pieces do not tell where they belong, see :func:`check_pieces`.
    """
    if not isinstance(value, DTensor) or value.layout.info is not mesh_info(mesh):
        return value
    check_pieces(value.layout, value.shape, module)
    local = local_of(value, grad_placements)
    if grad_placements is None and is_replicate(value.placements[0]):
        check_first_gradient(local, module, value.layout.info)
    return local


# Modules whose plain output had a gradient already, which was equal on all ranks.
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_first_gradient(local: torch.Tensor, module: nn.Module, info: MeshInfo) -> None:
    """Let the first gradient of a plain output that is equal on all ranks be compared over them.

    Nothing tells a plain tensor that it is whole from one that is a shard. Where the two meet, each rank computes with
    its own shard, and its gradient of the whole one is only a term. The comparison is one all-reduce of 48 bytes for
    each such tensor of the module's forwards before its first backward; no CommTrace counts it.

    Raises:
        ValueError: from the backward, on every rank, when the gradients differ.
    """
    if module in _checked or not local.requires_grad or local.is_leaf or torch.compiler.is_compiling():
        return

    def compare(grad: torch.Tensor) -> None:
        if _is_equal_on_ranks(grad, module, info):
            _checked.add(module)

    local.register_hook(compare)


def _is_equal_on_ranks(grad: torch.Tensor, module: nn.Module, info: MeshInfo) -> bool:
    """Whether a gradient could be compared: it is finite everywhere.

    Raises:
        ValueError: it differs by more than what kernels that add in another order may make of it.
    """
    flat = grad.detach().reshape(-1).double()
    weights = torch.linspace(1, 2, flat.numel(), dtype=flat.dtype, device=flat.device)
    size = flat.abs().sum()
    sums = torch.stack([(flat * weights).sum(), size, (~flat.isfinite()).sum().double()]).nan_to_num(0, 0, 0)
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=info.group((0,)).group)
    high, size_high, bad, low, size_low, _ = extremes.tolist()
    if bad:
        return False
    if max(high + low, size_high + size_low) > 1e-2 * size_high:
        raise ValueError(
            f"{type(module).__name__}: its style hands out a plain tensor that is equal on all ranks of {info!r}, and "
            "its gradient differs by rank: it meets plain tensors that are sharded (heads, features), so each rank has "
            "one term of the gradient. Say so, local_output_grad_placements=[Partial()], and the terms are summed; or "
            "keep DTensors with use_local_output=False"
        )
    return True


def check_pieces(layout: Layout, shape: Sequence[int], module: nn.Module) -> None:
    """Pieces of different length are handed out only along the last dim: there the next layer knows the whole length. A
    plain piece of a sequence says nothing about the others, and ranks that guess differently would hang.

    Raises:
        ValueError: another dim is unevenly sharded.
    """
    for axis, placement in enumerate(layout.placements):
        if is_shard(placement) and placement.dim != len(shape) - 1:
            length, ways = shape[placement.dim], layout.mesh_shape[axis]
            if length % ways:
                raise ValueError(
                    f"{type(module).__name__}: dim {placement.dim} of its output has length {length}, which {ways} "
                    "ranks do not divide, so plain pieces of it would differ in length from rank to rank. Pad it (see "
                    "ParallelDims.seq_len_divisor), or keep DTensors with use_local_output=False"
                )
