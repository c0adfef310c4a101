"""Spread tensors and modules over a mesh."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.comm import primitives as comm
from hyper_parallel.comm.redistribute import transition
from hyper_parallel.context import close_call, open_call
from hyper_parallel.sharding.layout import Layout, as_layout_or_whole
from hyper_parallel.sharding.mesh import AxisGroup, DeviceMesh, mesh_info, mesh_or_current
from hyper_parallel.sharding.placements import Placement, Replicate, Shard
from hyper_parallel.sharding.shard_ranges import dim_intervals, length, split_intervals
from hyper_parallel.sharding.spec import NOT_VARYING, contiguous_stride, make_spec
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.tensor.from_local_checks import check_same
from hyper_parallel.tensor.given_memory import note_leaf
from hyper_parallel.tensor.replaced_parameters import replaces_parameters

__all__ = ["distribute_module", "distribute_tensor"]

_SAID = "distribute_tensor: the tensor"


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | Layout | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Spread one global tensor over a mesh.

    Args:
        tensor: the global tensor, a leaf. Every rank passes one of the same shape and dtype; a meta tensor gives a
            DTensor on the meta device without communication.
        device_mesh: the mesh, by default that of the ``with mesh:`` block around; or a :class:`Layout`.
        placements: one per mesh axis; by default Replicate.
        src_data_rank: index along every mesh axis of the rank whose data counts: it is scattered over the axes that
            shard and broadcast over the others. ``None``: every rank slices what it has itself, without communication.

    Returns:
        A DTensor leaf that requires a gradient when ``tensor`` does.

    Raises:
        TypeError: ``tensor`` is no tensor.
        ValueError: the tensor is a DTensor in another layout, or not a leaf; the source rank is out of range; on every
            rank, when shapes, dtypes or placements differ by rank and ``src_data_rank`` is a rank.
    """
    device_mesh = mesh_or_current(device_mesh, "distribute_tensor")
    try:
        layout = _checked(tensor, device_mesh, placements)
    except (TypeError, ValueError) as error:
        if src_data_rank is not None:
            _tell(device_mesh, f"{type(error).__name__}: {error}")
        raise
    if isinstance(tensor, DTensor):
        return tensor
    data = tensor.detach().contiguous()
    spec = make_spec(layout, data.shape, contiguous_stride(data.shape), data.dtype)
    if data.device.type not in ("meta", layout.info.device_type):
        data = data.to(layout.info.default_device())
    if data.is_meta:
        local = data.new_empty(spec.local_shape)
    elif src_data_rank is None:
        local = _slice(data, layout)
    else:
        facts = f"{data.dtype}, {tuple(data.shape)}, {layout}, from rank {src_data_rank}"
        check_same(layout.info, _SAID, facts)
        local = _from_rank(data, layout, src_data_rank)
    if local is data or local.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
        local = local.clone()
    local.requires_grad_(tensor.requires_grad)
    note_leaf(local)
    return wrap(local, spec)


def _checked(tensor: Any, device_mesh: DeviceMesh | Layout, placements: Sequence[Placement] | None) -> Layout:
    """The layout that the arguments of :func:`distribute_tensor` mean."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"distribute_tensor takes the global tensor on every rank, got {type(tensor).__name__}. Ranks other than "
            "the source pass any tensor of its shape and dtype; torch.empty(()).expand(shape) takes no memory"
        )
    layout = as_layout_or_whole(device_mesh, placements, tensor.ndim)
    if isinstance(tensor, DTensor):
        if tensor.layout is not layout:
            raise ValueError(
                f"distribute_tensor: the tensor is a DTensor with {tensor.layout} already; use redistribute()"
            )
    elif not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor takes a leaf tensor; detach() it, or use DTensor.from_local to keep history"
        )
    return layout


def _tell(device_mesh: DeviceMesh | Layout, refused: str) -> None:
    """Tell the ranks that wait in :func:`distribute_tensor` that this one raises."""
    info = device_mesh.bind().info if isinstance(device_mesh, Layout) else mesh_info(device_mesh)
    with contextlib.suppress(ValueError):
        check_same(info, _SAID, refused)


def _slice(data: torch.Tensor, layout: Layout) -> torch.Tensor:
    whole = layout.replicated()
    return transition(data, (whole, NOT_VARYING), (layout, NOT_VARYING), tuple(data.shape))


def _from_rank(data: torch.Tensor, layout: Layout, src: int) -> torch.Tensor:
    """Scatter over the sharding axes, then broadcast the (smaller) pieces over the others, then make sums pending."""
    info = layout.info
    for axis, size in enumerate(info.shape):
        if not 0 <= src < size:
            raise ValueError(f"src_data_rank {src} is out of range on mesh axis {info.names[axis]!r} of size {size}")
    shape = tuple(data.shape)
    local = data  # off the source rank perhaps an expanded scalar: its memory is not touched
    current = layout.replicated()
    sharding = [axis for axes in layout.shard_order for axis in axes]
    for axis in sharding:
        placement = layout.placements[axis]
        assert isinstance(placement, Shard)
        group = info.group((axis,))
        local = _scatter(local, current, shape, placement, axis, group, _member(group, axis, src))
        current = current.with_placements({axis: placement})
    for axis in range(info.ndim):
        if axis not in sharding and info.shape[axis] > 1:
            group = info.group((axis,))
            local = local.contiguous().clone()
            comm.broadcast(local, group, _member(group, axis, src))
    return transition(local.contiguous(), (current, NOT_VARYING), (layout, NOT_VARYING), shape)


def _member(group: AxisGroup, axis: int, index: int) -> int:
    return next(m for m, coordinate in enumerate(group.coordinates) if coordinate[axis] == index)


def _scatter(
    local: torch.Tensor,
    current: Layout,
    shape: tuple[int, ...],
    placement: Shard,
    axis: int,
    group: AxisGroup,
    src: int,
) -> torch.Tensor:
    dim = placement.dim
    parts = _parts(current, shape, placement, axis, group)
    widest = max(length(p) for p in parts)
    piece_shape = list(local.shape)
    piece_shape[dim] = widest
    pieces = None
    if group.rank == src:
        pieces = []
        for part in parts:
            piece = local.new_zeros(piece_shape)
            offset = 0
            for start, stop in part:
                piece.narrow(dim, offset, stop - start).copy_(local.narrow(dim, start, stop - start))
                offset += stop - start
            pieces.append(piece)
    out = local.new_empty(piece_shape)
    comm.scatter(out, pieces, group, src)
    return out.narrow(dim, 0, length(parts[group.rank])).contiguous()


def _parts(
    whole: Layout, shape: tuple[int, ...], placement: Shard, axis: int, group: AxisGroup
) -> list[tuple[tuple[int, int], ...]]:
    """Where in this rank's piece in layout ``whole`` each member's part lies when ``axis`` shards it too."""
    size = length(dim_intervals(whole, shape, placement.dim, whole.info.my_coordinate()))
    inside = ((0, size),) if size else ()
    return [split_intervals(inside, placement, whole.mesh_shape[axis], c[axis]) for c in group.coordinates]


def gather_to_first(tensor: DTensor) -> torch.Tensor | None:
    """The whole tensor on the first rank of the mesh, None on the others; no rank else holds more than it sends on.

    The reverse of ``distribute_tensor``: the shards are gathered axis by axis, innermost first. All ranks of the mesh
    call it.

    Raises:
        ValueError: the tensor is a pending reduction.
    """
    layout, shape = tensor.layout, tuple(tensor.shape)
    if layout.is_partial():
        raise ValueError(f"gather_to_first: a pending reduction, {layout}; call reduce_partial() first")
    info, local = layout.info, tensor._resolve().detach()
    here = info.my_coordinate()
    if local.device.type != info.device_type:  # shards kept in host memory
        local = local.to(info.default_device())
    sharding = [axis for axes in layout.shard_order for axis in axes]
    if any(index and axis not in sharding for axis, index in enumerate(here)):
        return None  # this rank holds a copy
    for axis in reversed(sharding):
        placement = layout.placements[axis]
        assert isinstance(placement, Shard)
        layout = layout.with_placements({axis: Replicate()})
        gathered = _gather(local, layout, shape, placement, axis)
        if gathered is None:
            return None
        local = gathered
    return local


def _gather(
    local: torch.Tensor, target: Layout, shape: tuple[int, ...], placement: Shard, axis: int
) -> torch.Tensor | None:
    """The piece in layout ``target`` on the first member of the axis; None on the others."""
    group, dim = target.info.group((axis,)), placement.dim
    parts = _parts(target, shape, placement, axis, group)
    widest = max(length(p) for p in parts)
    size = list(local.shape)
    size[dim] = widest
    sent = local.contiguous()
    if local.shape[dim] < widest:
        sent = local.new_zeros(size)
        sent.narrow(dim, 0, local.shape[dim]).copy_(local)
    first = _member(group, axis, 0)
    pieces = [torch.empty_like(sent) for _ in parts] if group.rank == first else None
    comm.gather(pieces, sent, group, first)
    if pieces is None:
        return None
    size[dim] = sum(length(p) for p in parts)
    out = local.new_empty(size)
    for piece, part in zip(pieces, parts, strict=True):
        offset = 0
        for start, stop in part:
            out.narrow(dim, start, stop - start).copy_(piece.narrow(dim, offset, stop - start))
            offset += stop - start
    return out


_DISTRIBUTED = "_hyper_parallel_distributed"


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Spread a module over a mesh in three stages, in place.

    Args:
        module: the module.
        device_mesh: the mesh; by default that of the ``with mesh:`` block around.
        partition_fn: called as ``(name, submodule, mesh)`` on every submodule to shard its parameters. What it leaves
            plain, parameters and buffers, becomes Replicate.
        input_fn: called as ``(module, inputs, mesh)`` before the module's forward; returns the new positional inputs.
        output_fn: called as ``(module, outputs, mesh)`` after it; returns the new output.

    Raises:
        RuntimeError: the module was distributed before.
        ValueError: ``input_fn`` or ``output_fn`` takes another number of arguments.
    """
    if getattr(module, _DISTRIBUTED, False):
        raise RuntimeError(
            "distribute_module: this module was distributed before; build it anew or redistribute its parameters"
        )
    for name, fn in (("input_fn", input_fn), ("output_fn", output_fn)):
        if fn is not None and not _takes_three(fn):
            raise ValueError(
                f"distribute_module: {name} takes (module, values, device_mesh), got {inspect.signature(fn)}"
            )
    mesh = mesh_or_current(device_mesh, "distribute_module")
    with replaces_parameters([module], "distribute_module"):
        for name, submodule in module.named_modules():
            if partition_fn is not None:
                partition_fn(name, submodule, mesh)
        replicate_rest(module, mesh)
    if next(module.children(), None) is not None:  # what one without children takes others may take too
        module.register_forward_pre_hook(open_call, prepend=True)
        module.register_forward_hook(close_call, always_call=True)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, mesh))
    setattr(module, _DISTRIBUTED, True)
    return module


def _takes_three(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn).bind(None, None, None)
    except TypeError:
        return False
    return True


def replicate_rest(
    module: nn.Module, device_mesh: DeviceMesh, *, src_data_rank: int | None = 0, buffers: bool = True
) -> None:
    """Make every parameter (and buffer) that is still plain a Replicate DTensor; tied ones stay tied."""
    placements = [Replicate()] * device_mesh.ndim
    done: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in list(submodule._parameters.items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in done:
                done[id(parameter)] = as_parameter(
                    distribute_tensor(parameter, device_mesh, placements, src_data_rank=src_data_rank), parameter
                )
            submodule._parameters[name] = done[id(parameter)]
        for name, buffer in list(submodule._buffers.items()) if buffers else ():
            if buffer is not None and not isinstance(buffer, DTensor):
                submodule._buffers[name] = distribute_tensor(
                    buffer, device_mesh, placements, src_data_rank=src_data_rank
                )


def as_parameter(tensor: DTensor, like: nn.Parameter) -> nn.Parameter:
    """A parameter around a DTensor, with the attributes that users put on the old one."""
    parameter = nn.Parameter(tensor, requires_grad=like.requires_grad)
    for name, value in vars(like).items():
        if not hasattr(parameter, name):
            setattr(parameter, name, value)
    return parameter
