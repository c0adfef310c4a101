"""``input_reshard``: what is kept of a replicated input for the backward is this rank's slice of it.

With tensor parallelism every rank holds the same input of a block, and keeps all of it: for activation checkpointing
that is all that is kept. A slice per rank is enough; the backward gathers it. (Korthikanti et al. 2022, section 4.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hyper_parallel import DeviceMesh, DTensor, Layout, Replicate, Shard
from hyper_parallel.rules import NOT_VARYING, Spec, is_replicate, local_of, map_structure, mesh_info, transition, wrap

__all__ = ["input_reshard"]


def input_reshard(module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> nn.Module:
    """Keep this rank's slice of the module's inputs for the backward, where all of them would be kept.

        parallelize_module(block, mesh["tp"], plan)
        block = input_reshard(checkpoint_wrapper(block), mesh["tp"], 1)

    Forward costs no communication, backward one all-gather per input, however many operators have kept it. Inputs are
    DTensors that are Replicate over the mesh, and plain tensors, which must then be equal on its ranks; a DTensor that
    is sharded there already is left alone, and so is whatever else the module keeps. (PyTorch's takes *every* plain
    tensor that is kept for a replica.)

    Args:
        module: the module, already parallelised; a checkpoint wrapper or any other.
        tp_device_mesh: 1-D mesh over whose ranks inputs are cut.
        input_reshard_dim: dim of the inputs along which they are cut, uneven lengths too; inputs without that dim, or
            with fewer elements than ranks, are kept whole. None does nothing.

    Returns:
        The module, with hooks.

    Raises:
        ValueError: the mesh has several axes.
    """
    if input_reshard_dim is None:
        return module
    if tp_device_mesh.ndim != 1:
        raise ValueError(
            f"input_reshard cuts over one mesh axis, such as mesh['tp']; got a mesh of {tp_device_mesh.mesh_dim_names}"
        )
    entered: list[_Resharding | None] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            entered.append(None)
            return None
        resharding = _Resharding(tp_device_mesh, input_reshard_dim)
        args, kwargs = map_structure((args, kwargs), resharding.taken)
        entered.append(resharding)
        resharding.__enter__()
        return args, kwargs

    def after(module: nn.Module, args: Any, output: Any) -> None:
        resharding = entered.pop() if entered else None  # empty when another hook raised before ours
        if resharding is not None:
            resharding.__exit__(None, None, None)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)  # also when forward raises
    return module


class _Resharding(saved_tensors_hooks):
    """One forward: of what is saved, the module's inputs are cut."""

    def __init__(self, mesh: DeviceMesh, dim: int) -> None:
        super().__init__(self.pack, _unpack)
        self.mesh, self.dim = mesh, dim
        self.slices: dict[int, _InputSlice] = {}

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """The input as the module is to see it."""
        if isinstance(tensor, DTensor):
            local_of(tensor)  # has arrived, if it was in flight: that counts as a write
        return without_hold(tensor) if self.note(tensor) and isinstance(tensor, DTensor) else tensor

    def note(self, tensor: torch.Tensor) -> bool:
        """Cut this tensor when it is saved, if it is a replica that can be cut; whether it is."""
        if not -tensor.ndim <= self.dim < tensor.ndim or tensor.numel() < self.mesh.size():
            return False
        if isinstance(tensor, DTensor):
            local, layout = local_of(tensor), tensor.layout
            axis = _axis_of(tensor, self.mesh)
            if axis is None or not is_replicate(layout.placements[axis]):
                return False
        else:
            local, axis, layout = tensor, 0, Layout.from_placements(self.mesh, [Replicate()], ndim=tensor.ndim)
        sliced = layout.with_placements({axis: Shard(self.dim % tensor.ndim)})
        self.slices.setdefault(_memory(local), _InputSlice(local, layout, sliced, tuple(tensor.shape)))
        return True

    def pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, DTensor):  # kept as such by an autograd.Function: by a checkpoint
            self.note(tensor)
            local, spec = local_of(tensor), tensor.spec
        else:
            local, spec = tensor, None
        found = self.slices.get(_memory(local))
        if found is None or not found.covers(local):
            return tensor
        return _Saved(found, local, spec)


class _InputSlice:
    """This rank's slice of one input. All operators that keep the input share it, and one all-gather."""

    def __init__(self, local: torch.Tensor, whole: Layout, sliced: Layout, shape: tuple[int, ...]) -> None:
        self.typed = (whole, NOT_VARYING), (sliced, NOT_VARYING)
        self.shape = shape
        self.form = (local.shape, local.dtype, local._version, local.storage_offset())
        self.contiguous = local.is_contiguous()
        # While this is there, no other tensor gets the identity of the input's memory.
        self.memory = StorageWeakRef(local.untyped_storage())
        self.piece: torch.Tensor | None = None
        self.gathered: torch.Tensor | None = None
        self.uses = self.left = 0

    def covers(self, local: torch.Tensor) -> bool:
        """Whether a tensor in the input's memory is all of the input, perhaps in another shape, and as it was."""
        shape, *rest = self.form
        same = local.shape == shape or (local.numel() == shape.numel() and local.is_contiguous())
        return same and self.contiguous and [local.dtype, local._version, local.storage_offset()] == rest

    def keep(self, local: torch.Tensor) -> None:
        """Note one more use, and make the slice at the first."""
        self.uses += 1
        if self.piece is None:
            with torch.no_grad():
                self.piece = transition(local.view(self.form[0]), *self.typed, self.shape)

    def restored(self) -> torch.Tensor:
        """The input, gathered for the first of its users in a backward and dropped with the last."""
        if self.gathered is None:
            assert self.piece is not None
            with torch.no_grad():
                self.gathered = transition(self.piece, *self.typed[::-1], self.shape)
            self.left = self.uses
        result = self.gathered
        self.left -= 1
        if not self.left:
            self.gathered = None
        return result


class _Saved:
    """What is saved in the place of an input: its slice, and the form in which it was saved."""

    def __init__(self, of: _InputSlice, local: torch.Tensor, spec: Spec | None) -> None:
        of.keep(local)
        self.of, self.shape, self.spec = of, local.shape, spec

    def restored(self) -> torch.Tensor:
        with torch.no_grad():
            local = self.of.restored().view(self.shape)
            return local if self.spec is None else wrap(local, self.spec)


def without_hold(tensor: DTensor) -> DTensor:
    """The same tensor, whose C++ graph does not hold its memory.

    For C++ a DTensor is a leaf (its history is that of its local tensor), and an ``autograd.Function`` that it goes
    into, such as a checkpoint, holds its leaves. Here the leaf is one that weighs nothing.
    """
    if not torch.is_grad_enabled() or tensor.is_leaf or not tensor.requires_grad:
        return tensor
    local = local_of(tensor)
    weightless = wrap(_Weightless.apply(local), tensor.spec)
    with torch.no_grad():
        whole = wrap(local.detach(), tensor.spec)
    return _Instead.apply(weightless, [whole])


class _Weightless(torch.autograd.Function):
    """The shape and the history of a tensor, and one element of memory."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(local.shape, [0] * local.ndim, dtype=local.dtype, device=local.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Instead(torch.autograd.Function):
    """The value of another DTensor, with the history of this one."""

    @staticmethod
    def forward(ctx: Any, history: DTensor, value: list[DTensor]) -> DTensor:
        return value[0]

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        return grad, None


def _unpack(saved: Any) -> torch.Tensor:
    return saved.restored() if isinstance(saved, _Saved) else saved


def _memory(tensor: torch.Tensor) -> int:
    """Identity of the memory that a tensor looks at."""
    return tensor.untyped_storage()._cdata


def _axis_of(tensor: DTensor, mesh: DeviceMesh) -> int | None:
    """Which axis of the tensor's mesh a 1-D mesh is; None when it is none of them."""
    mine, theirs = mesh_info(tensor.device_mesh), mesh_info(mesh)
    if mine.axes_beyond(theirs) is None:
        return None
    return mine.names.index(theirs.names[0])
