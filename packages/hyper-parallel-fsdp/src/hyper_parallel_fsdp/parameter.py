"""One parameter: the sharded DTensor that optimizers and checkpoints see, and the whole one that computation sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hyper_parallel import DTensor, Layout
from hyper_parallel.rules import (
    NOT_VARYING,
    as_parameter,
    chunk_bounds,
    contiguous_stride,
    is_replicate,
    local_of,
    make_spec,
    note_replaced,
    primitives,
    wrap,
)
from hyper_parallel_fsdp.data_mesh import ParamPlacement
from hyper_parallel_fsdp.group_info import DataGroups, GroupInfo

Owner = tuple[nn.Module, str]
"""A module and the name under which it holds the parameter."""


class HSDPParam:
    """A parameter that ``fully_shard`` manages.

    Attributes:
        name: dotted name in the module that was wrapped.
        owners: every place that holds it; several when it is tied.
        sharded: the parameter outside of forward and backward: one DTensor that carries data, tensor and expert
            parallelism at once.
        placement: its layouts and groups.
        whole_shape: shape that this rank holds of it when it is unsharded (tensor parallelism stays).
        shards: start and stop along the sharded dim of each member of the sharding group.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, owners: Sequence[Owner], placement: ParamPlacement, device: Any
    ) -> None:
        self.name, self.owners, self.placement = name, list(owners), placement
        data: Any = parameter.detach()
        local = data.to_local() if isinstance(data, DTensor) else data
        self.whole_shape = tuple(local.shape)
        self.dim = placement.dim
        size = self.whole_shape[self.dim] if local.ndim else 1
        self.shards = _shards(size, placement)
        start, stop = self.shards[self._member]
        mine = local if len(self.shards) == 1 else local.narrow(self.dim, start, stop - start)
        if mine.device != device and not mine.is_meta:
            mine = mine.to(device)
        mine = mine.contiguous() if len(self.shards) == 1 else mine.clone(memory_format=torch.contiguous_format)
        self.shape = tuple(parameter.shape)
        self.sharded = self._parameter(mine, placement.sharded, parameter)
        self.unsharded: nn.Parameter | None = None
        self.handed_out: Any = None
        self.accumulated: torch.Tensor | None = None
        self.averaged = 1  # size of the model axes over which gradients are averaged too
        self._put: tuple[int, Any] | None = None

    @property
    def sharded_group_info(self) -> GroupInfo:
        """The ranks among which it is sharded."""
        return self.placement.groups.sharded_group_info

    @property
    def unsharded_group_info(self) -> GroupInfo:
        """The ranks that hold the same shard for other data."""
        return self.placement.groups.unsharded_group_info

    @property
    def groups(self) -> DataGroups:
        """Both groups, their sizes, and the reduction that follows from them."""
        return self.placement.groups

    @property
    def rank_size(self) -> int:
        """Number of ranks whose gradients are reduced."""
        return self.groups.rank_size

    @property
    def shard_size(self) -> int:
        """Number of shards."""
        return self.groups.shard_size

    @property
    def dp_size(self) -> int:
        """Number of copies of each shard."""
        return self.groups.dp_size

    @property
    def _member(self) -> int:
        group = self.sharded_group_info.group
        return 0 if group is None else group.rank

    def _parameter(self, local: torch.Tensor, layout: Layout, like: nn.Parameter) -> nn.Parameter:
        with torch.enable_grad():
            spec = make_spec(layout, self.shape, contiguous_stride(self.shape), local.dtype)
            return as_parameter(wrap(local, spec), like)

    # -- geometry ---------------------------------------------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return local_of(self.sharded)  # type: ignore[arg-type]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return self.shape_of(self._member)

    @cached_property
    def local_numel(self) -> int:
        """Number of elements of this rank's shard."""
        return math.prod(self.local_shape)

    def shape_of(self, member: int) -> tuple[int, ...]:
        """Shape of a member's shard."""
        if len(self.shards) == 1:
            return self.whole_shape
        start, stop = self.shards[member]
        return (*self.whole_shape[: self.dim], stop - start, *self.whole_shape[self.dim + 1 :])

    @cached_property
    def slot(self) -> int:
        """Number of elements of the largest shard, which is what each member sends."""
        return max(math.prod(self.shape_of(m)) for m in range(len(self.shards)))

    @cached_property
    def stacked(self) -> bool:
        """Whether the members' slots one after the other are the whole parameter, but for padding at the end."""
        step = self.shards[0][1]
        size = self.whole_shape[0] if self.whole_shape else 1
        return self.dim == 0 and all(
            bounds == (min(i * step, size), min((i + 1) * step, size)) for i, bounds in enumerate(self.shards)
        )

    @cached_property
    def even(self) -> bool:
        """Whether all members hold as much, in order."""
        step = self.shards[0][1]
        return all(bounds == (i * step, (i + 1) * step) for i, bounds in enumerate(self.shards))

    @cached_property
    def region(self) -> int:
        """Number of elements that the whole parameter takes in the buffer of whole parameters."""
        return self.slot * len(self.shards) if self.stacked else math.prod(self.whole_shape)

    def by_member(self, whole: torch.Tensor) -> torch.Tensor:
        """An even whole parameter (or gradient) with the members along dim 0; a view."""
        shape = self.whole_shape
        parts = (len(self.shards), shape[self.dim] // len(self.shards))
        return whole.reshape(*shape[: self.dim], *parts, *shape[self.dim + 1 :]).movedim(self.dim, 0)

    def average_over(self, names: tuple[str, ...]) -> None:
        """Average the gradient over these mesh axes too, where the parameter is Replicate."""
        placement, info = self.placement, self.placement.sharded.info
        axes = {
            info.axis(n) for n in names if n in info.names and is_replicate(placement.whole.placements[info.axis(n)])
        }
        extra = axes - placement.varying
        copies = GroupInfo.over(info, tuple((placement.varying - set(placement.shard_axes)) | extra))
        self.placement = replace(placement, groups=DataGroups(self.sharded_group_info, copies))
        self.averaged = math.prod(info.shape[a] for a in extra)

    def synchronize(self) -> None:
        """Give every copy the value of the first one."""
        layout = self.placement.sharded
        group = GroupInfo.over(layout.info, tuple(a for a, p in enumerate(layout.placements) if is_replicate(p))).group
        if group is not None and self.local_numel:
            with torch.no_grad():
                primitives.broadcast(self.local, group, 0)

    # -- the two forms ----------------------------------------------------------------------------------------------

    def put_shard(self, place: torch.Tensor) -> None:
        """Move this rank's shard into ``place``, a part of the flat buffer; the parameter stays the same object."""
        place.copy_(self.local)
        self.local.data = place
        self.sharded.forget_forms()  # type: ignore[attr-defined]
        # As memory that the user was given: the flat buffer is written as a whole too.
        self._put = (self.sharded.to_local().data_ptr(), self.sharded.spec)  # type: ignore[attr-defined]

    @property
    def moved(self) -> bool:
        """Whether the shard got other memory or another dtype (``to_empty``, ``.data =``) since it was put in place."""
        put = self._put
        return put is None or put[0] != self.local.data_ptr() or put[1] is not self.sharded.spec  # type: ignore[attr-defined]

    def replace_sharded(self, parameter: nn.Parameter) -> None:
        """Another parameter object, laid out alike, took the place of the sharded one in the modules."""
        note_replaced(self.sharded, parameter, repr(self.name), "load_state_dict(assign=True) or another assignment")
        self.sharded, self._put = parameter, None
        self.register(parameter)

    def make_unsharded(self, region: torch.Tensor, laid_out: bool) -> None:
        """Make the whole parameter, whose memory is ``region``.

        Args:
            region: flat, with ``self.region`` elements.
            laid_out: whether computation sees a DTensor over the data axes, varying over them.
        """
        like, placement = self.sharded, self.placement
        # Its own version counter: filling the buffer again is no write that autograd should complain about.
        data = region[: math.prod(self.whole_shape)].view(self.whole_shape).data
        leaf = nn.Parameter(data, requires_grad=like.requires_grad)
        layout = placement.whole if laid_out else placement.local
        with torch.enable_grad():
            self.unsharded = leaf
            if layout is None:
                self.handed_out = leaf
            else:
                varying = placement.varying if laid_out else NOT_VARYING
                spec = make_spec(layout, self.shape, contiguous_stride(self.shape), leaf.dtype, varying)
                self.handed_out = wrap(leaf, spec)
                self.handed_out._is_param = True
        for name, value in vars(like).items():
            if name not in DTensor.__annotations__ and not hasattr(self.handed_out, name):
                setattr(self.handed_out, name, value)

    def register(self, parameter: Any) -> None:
        """Let the modules hold this form."""
        for module, attribute in self.owners:
            module._parameters[attribute] = parameter

    def register_unsharded(self) -> None:
        """Let the modules hold the whole parameter."""
        leaf = self.unsharded
        assert leaf is not None
        wanted = self.local.requires_grad
        if leaf.requires_grad is not wanted:
            self.handed_out.requires_grad_(wanted)
        if self.handed_out is not leaf:
            self.handed_out.forget_forms()
        self.register(self.handed_out)

    def take_gradient(self) -> torch.Tensor | None:
        """The whole gradient that backward left, which is forgotten here. A sparse one (of an embedding) becomes
        dense: it is cut into shards."""
        leaf = self.unsharded
        grad = None if leaf is None else leaf.grad
        if grad is None:
            return None
        assert leaf is not None
        leaf.grad = None
        return grad.to_dense() if grad.is_sparse else grad

    def add_gradient(self, grad: torch.Tensor) -> None:
        """Add this rank's part of the reduced gradient, with the shard's device and dtype, to the sharded parameter's
        ``.grad``."""
        local = self.local
        for hook in _hooks(local, "_backward_hooks"):  # of register_hook
            changed = hook(grad)
            grad = grad if changed is None else changed
        if local.grad is None:
            local.grad = grad
        else:
            local.grad.add_(grad)
        for hook in _hooks(local, "_post_accumulate_grad_hooks"):
            hook(local)


def _hooks(local: torch.Tensor, kind: str) -> tuple[Any, ...]:
    hooks = getattr(local, kind, None)
    return tuple(hooks.values()) if hooks else ()


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks were registered on a parameter, plain or DTensor."""
    local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
    return bool(_hooks(local, "_backward_hooks") or _hooks(local, "_post_accumulate_grad_hooks"))


def _shards(size: int, placement: ParamPlacement) -> tuple[tuple[int, int], ...]:
    """What each member of the sharding group holds, in the order of the group."""
    group = placement.groups.sharded_group_info.group
    if group is None:
        return ((0, size),)
    info = placement.sharded.info
    bounds = []
    for coordinate in group.coordinates:
        low, high = 0, size
        for axis in placement.shard_axes:
            start, stop = chunk_bounds(high - low, info.shape[axis], coordinate[axis])
            low, high = low + start, low + stop
        bounds.append((low, high))
    return tuple(bounds)
