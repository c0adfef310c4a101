"""Parameters that are gathered and reduced together: one flat buffer, one all-gather, one reduction."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hyper_parallel.rules import AxisGroup, described, is_tracing, primitives
from hyper_parallel_fsdp.group_info import DataGroups
from hyper_parallel_fsdp.parameter import HSDPParam


class Bucket:
    """Parameters of one module with the same groups and dtype.

    The shards of a rank lie one after the other in ``shards``, of which the sharded parameters are views: that buffer
    is what the all-gather sends. The whole parameters are views of ``whole``, whose memory exists only while it is
    needed.

    Args:
        params: the parameters; those whose members stack up to the whole parameter come first.
        dtype: in which they are gathered and used.
        device: on which they are used.
        offload: policy by which the shards live in host memory, or None.
        laid_out: whether computation sees DTensors over the data axes.
        kept_by: number of neighbouring ranks that keep the whole parameters together between forward and backward;
            None where each rank keeps its shards only.
    """

    def __init__(
        self,
        params: list[HSDPParam],
        dtype: torch.dtype,
        device: torch.device,
        offload: Any,
        laid_out: bool,
        kept_by: int | None = None,
    ) -> None:
        self.params = sorted(params, key=lambda p: not p.stacked)
        self.dtype, self.device = dtype, device
        self.groups: DataGroups = self.params[0].groups
        self.members = self.groups.shard_size
        self.slots = [p.slot for p in self.params]
        stacked = [p for p in self.params if p.stacked]
        self._stacked_slots = self.slots[: len(stacked)]
        self.offloaded = offload is not None
        self.shards = self._pack(offload)
        self.partial: torch.Tensor | None = None  # a reduce-scatter's result that was not all-reduced yet
        self.in_place = self.members == 1 and self.dtype is self.shards.dtype and self.shards.device == device
        regions = [p.region for p in self.params]
        self._keepers: AxisGroup | None = None
        group = self.groups.sharded_group_info.group
        if kept_by is not None and group is not None:
            self._keepers = self.params[0].placement.sharded.info.part_of_group(group.axes, kept_by)
        self._part: torch.Tensor | None = None  # this rank's, of what the keepers keep together
        if self.in_place:
            self.whole = self.shards
        else:
            parts = 1 if self._keepers is None else self._keepers.size
            self.whole = torch.empty(-(-sum(regions) // parts) * parts, dtype=dtype, device=device)
        self._filled = self.whole[: sum(regions)]
        pieces = self._filled.split(regions)
        for param, region in zip(self.params, pieces, strict=True):
            param.make_unsharded(region, laid_out)
        # Where the all-gather can write straight into the whole parameters: nothing has to be moved afterwards.
        self._direct = self.members == 1 or (len(self.params) == 1 and self.params[0].stacked)
        self._stacked_views = [r.view(self.members, slot) for r, slot in zip(pieces, self._stacked_slots, strict=False)]
        self._other_views = [
            r[: math.prod(p.whole_shape)].view(p.whole_shape)
            for p, r in zip(self.params[len(stacked) :], pieces[len(stacked) :], strict=True)
        ]
        self.gathered = self.in_place
        self._work: tuple[Any, torch.Tensor | None] | None = None  # with rows, where they have to be put in place
        self._versions = -1
        self._ones: torch.Tensor | None = None
        self.free()

    def _pack(self, offload: Any) -> torch.Tensor:
        """The flat buffer of this rank's shards, with every sharded parameter a view of it."""
        first = self.params[0].local
        pin = bool(offload) and offload.pin_memory and self.device.type != "cpu"
        shards = torch.zeros(sum(self.slots), dtype=first.dtype, device=first.device, pin_memory=pin)
        with torch.no_grad():
            for param, slot in zip(self.params, shards.split(self.slots), strict=True):
                param.put_shard(slot[: param.local_numel].view(param.local_shape))
        return shards

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor lies in the whole parameters, whose memory goes when they are freed."""
        if self.in_place or tensor.layout is not torch.strided:
            return False
        return bool(tensor.untyped_storage()._cdata == self.whole.untyped_storage()._cdata)

    # -- gathering --------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether a shard was written to since it was gathered (an optimizer's step, a loaded state dict)."""
        return not self.in_place and self._versions != self._version_sum()

    def _version_sum(self) -> int:
        return sum(p.local._version for p in self.params)

    def start_gather(self) -> None:
        """Begin the all-gather; nothing when the parameters are whole, or on the way."""
        if self._work is None and not (self.gathered and not self.stale):
            with torch.no_grad():
                self._start_gather()

    def _start_gather(self) -> None:
        self.gathered = False
        if self._part is not None and not self.stale:
            self._allocate()
            self._all_gather(self.whole, self._part, self._keepers, in_place=True)
            return
        self._versions = self._version_sum()
        if self._direct:
            self._allocate()
        # In two steps: from host memory the shards go out as they are pinned, and are converted on the device.
        source = self.shards.to(self.device, non_blocking=True).to(self.dtype)
        if self.members == 1:
            self.whole.copy_(source)
            self.gathered = True
            return
        out = self._filled if self._direct else self.whole.new_empty(self.members * self.shards.numel())
        self._all_gather(out, source, self.groups.sharded_group_info.group, self._direct)

    def _all_gather(self, out: torch.Tensor, source: torch.Tensor, group: Any, in_place: bool) -> None:
        with self.traced("gather"):
            work = primitives.all_gather(out, source, group, async_op=True)
        self._work = (work, None if in_place else out)

    def finish_gather(self) -> None:
        """Wait for the all-gather and put what arrived in its place."""
        if self._work is None:
            return
        work, rows = self._work
        self._work = None
        with torch.no_grad():
            work.wait()
            if rows is not None:
                self._allocate()  # not earlier: what is gathered ahead of its use takes this memory once
                self._scatter_rows(rows.view(self.members, -1))
        self.gathered, self._part = True, None

    def _scatter_rows(self, rows: torch.Tensor) -> None:
        """Copy from one row per member to one region per parameter."""
        begin = sum(self._stacked_slots)
        if begin:
            torch.split_with_sizes_copy(rows[:, :begin], self._stacked_slots, dim=1, out=self._stacked_views)
        others = self.params[len(self._stacked_slots) :]
        for param, slot, whole in zip(others, self.slots[len(self._stacked_slots) :], self._other_views, strict=True):
            part = rows[:, begin : begin + slot]
            begin += slot
            if param.even:
                to = param.by_member(whole)
                to.copy_(part.view(to.shape))
                continue
            for member, (row, (start, stop)) in enumerate(zip(part, param.shards, strict=True)):
                shape = param.shape_of(member)
                whole.narrow(param.dim, start, stop - start).copy_(row[: math.prod(shape)].view(shape))

    def traced(self, what: str) -> AbstractContextManager[None]:
        """Say in a :class:`~hyper_parallel.comm.trace.CommTrace` what a collective is for."""
        if not is_tracing():
            return nullcontext()
        more = f" and {len(self.params) - 1} more" if len(self.params) > 1 else ""
        return described(f"fully_shard: {what} {self.params[0].name}{more}")

    def used(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """So many ones for each member: what says that this rank has all gradients."""
        if self._ones is None or self._ones.shape[1] != count or self._ones.dtype is not dtype:
            self._ones = torch.ones(self.members, count, dtype=dtype, device=self.device)
        return self._ones

    def _allocate(self) -> None:
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())

    def keep_part(self) -> None:
        """Keep this rank's part of the whole parameters, from which the keepers gather them again; free the rest."""
        keepers, part = self._keepers, None
        if keepers is not None and self.gathered:
            size = self.whole.numel() // keepers.size
            part = self.whole.narrow(0, keepers.rank * size, size).clone()
        self.free()
        self._part = part

    def free(self) -> None:
        """Give back the memory of the whole parameters."""
        self._part = None
        if self._work is not None:  # gathered ahead and not used
            self._work[0].wait()
            self._work = None
        if not self.in_place:
            self.whole.untyped_storage().resize_(0)
            self.gathered = False
