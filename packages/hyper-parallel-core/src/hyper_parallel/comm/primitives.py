"""The bare collectives, on plain tensors and without autograd. All communication of tensors goes through here, so that
a :class:`~hyper_parallel.comm.trace.CommTrace` sees it; the comparison of plugins at a mesh's first use does not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.comm import trace as comm_trace
from hyper_parallel.sharding.mesh import AxisGroup

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# torch takes tensors in other memory orders too (channels_last), and then mixes up their elements.
_AS_IT_LIES = "what is cut up or joined has to be contiguous: collectives send memory as it lies"

# Dtypes that not every backend knows, and one of the same size in which the bits are moved.
_MOVED_AS = {torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32}
_MOVED_AS |= {torch.uint64: torch.int64}
_MOVED_AS |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu), torch.uint8)
_MOVED_AS |= dict.fromkeys((torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.uint8)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of its bits as a dtype that every backend can move."""
    dtype = _MOVED_AS.get(tensor.dtype)
    return tensor if dtype is None else tensor.view(dtype)


def all_reduce(tensor: torch.Tensor, group: AxisGroup, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce a contiguous tensor in place over a group."""
    if comm_trace._active:
        comm_trace.record("all_reduce", tensor, group)
    return dist.all_reduce(tensor, _REDUCE_OPS[op], group.group, async_op)


def all_gather(out: torch.Tensor, tensor: torch.Tensor, group: AxisGroup, async_op: bool = False) -> Any:
    """Concatenate the groups' equal-sized tensors along dim 0 into ``out``, in group rank order."""
    assert tensor.is_contiguous(), _AS_IT_LIES
    if comm_trace._active:
        comm_trace.record("all_gather", out, group)
    return dist.all_gather_single(movable(out), movable(tensor), group.group, async_op)


def reduce_scatter(
    out: torch.Tensor, tensor: torch.Tensor, group: AxisGroup, op: str = "sum", async_op: bool = False
) -> Any:
    """Reduce ``tensor`` and leave this rank's equal part of dim 0 in ``out``."""
    assert tensor.is_contiguous(), _AS_IT_LIES
    if comm_trace._active:
        comm_trace.record("reduce_scatter", tensor, group)
    return dist.reduce_scatter_single(out, tensor, _REDUCE_OPS[op], group.group, async_op)


def all_to_all(
    out: torch.Tensor,
    tensor: torch.Tensor,
    out_splits: list[int],
    in_splits: list[int],
    group: AxisGroup,
    async_op: bool = False,
) -> Any:
    """Send ``in_splits[r]`` elements of a flat tensor to each member ``r`` and receive ``out_splits[r]``."""
    if comm_trace._active:
        comm_trace.record("all_to_all", out if out.numel() > tensor.numel() else tensor, group)
    return dist.all_to_all_single(movable(out), movable(tensor), out_splits, in_splits, group.group, async_op)


def broadcast(tensor: torch.Tensor, group: AxisGroup, group_src: int) -> None:
    """Copy the tensor of member ``group_src`` to all, in place."""
    if comm_trace._active:
        comm_trace.record("broadcast", tensor, group)
    dist.broadcast(movable(tensor), group=group.group, group_src=group_src)


def scatter(out: torch.Tensor, parts: list[torch.Tensor] | None, group: AxisGroup, group_src: int) -> None:
    """Give each member its equal-sized part; only ``group_src`` passes ``parts``."""
    if comm_trace._active:
        comm_trace.record("scatter", out, group)
    dist.scatter(movable(out), parts and [*map(movable, parts)], group=group.group, group_src=group_src)


def gather(parts: list[torch.Tensor] | None, tensor: torch.Tensor, group: AxisGroup, group_dst: int) -> None:
    """Give member ``group_dst`` the equal-sized tensors of all; only it passes ``parts``."""
    if comm_trace._active:
        comm_trace.record("gather", tensor, group)
    dist.gather(movable(tensor), parts and [*map(movable, parts)], group=group.group, group_dst=group_dst)
