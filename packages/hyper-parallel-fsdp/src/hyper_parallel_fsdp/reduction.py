"""The reduction of a bucket's gradients over the data axes, in flight."""

from __future__ import annotations

import math
from typing import Any

import torch

from hyper_parallel.rules import primitives, torch_compat
from hyper_parallel_fsdp.bucket import Bucket
from hyper_parallel_fsdp.parameter import HSDPParam

Gradients = list[tuple[HSDPParam, torch.Tensor | None]]
"""The trained parameters of a bucket, each with its whole gradient or None."""


class GradientReduction:
    """One reduction: reduce-scatter, then all-reduce, as the groups ask for.

    Ranks may use different parameters of a module in a step. So all of its parameters travel, zeros for those without
    a gradient, and with them one number each: on how many ranks it had one. A parameter that no rank used keeps
    ``grad=None``, as on one device.

    Args:
        bucket: the parameters.
        gradients: of those that are trained; taken out of the list.
        dtype: in which gradients travel and are added up.
        factor: what the sum is divided by.
        all_reduce: whether the copies of a shard are added up now; if not, the sum waits in the bucket.
        stream: side stream of an accelerator, or None.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: Gradients,
        dtype: torch.dtype,
        factor: float,
        all_reduce: bool,
        stream: Any,
    ) -> None:
        self._bucket, self._params = bucket, [p for p, _ in gradients]
        self._missing = [g is None for _, g in gradients]
        self._all_reduce: bool | None = all_reduce  # None: begun
        # Half precision overflows when many terms are added up: divide in two steps.
        self._before = float(2 ** (math.frexp(factor)[1] // 2)) if dtype is torch.float16 and factor > 1 else 1.0
        self._after = factor / self._before
        self._stream = stream
        self._work: Any = None
        self._arriving: torch.Tensor | None = None  # in host memory, while the backward goes on
        self._rows: torch.Tensor | None = self._packed([g for _, g in gradients], dtype)
        gradients.clear()  # before more memory is taken to send them
        if stream is None:
            self._scatter()
            return
        device = torch.get_device_module(bucket.device)
        stream.wait_stream(device.current_stream())
        with device.stream(stream):  # which waits for the collectives in place of the program
            self._scatter()
            while not self._advance():
                pass
            self._event = device.Event()
            self._event.record(stream)

    def _packed(self, grads: list[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """One row per member with its part of every gradient, then for each parameter whether it has one."""
        members, device = self._bucket.members, self._bucket.device
        kinds = {g.dtype for g in grads if g is not None}
        kind = kinds.pop() if len(kinds) == 1 else dtype
        parts = [
            torch.zeros((), device=device, dtype=kind).expand(members, p.slot) if g is None else _by_rows(p, g.to(kind))
            for p, g in zip(self._params, grads, strict=True)
            if p.slot
        ]
        used = self._bucket.used(len(grads), kind)
        if any(self._missing):
            used = used.clone()
            used[:, [i for i, missing in enumerate(self._missing) if missing]] = 0
        parts.append(used)
        self._sizes = [*(p.slot for p in self._params), len(grads)]
        rows = torch.empty(members, sum(self._sizes), dtype=dtype, device=device)
        torch_compat.chunk_cat(parts, dim=0, num_chunks=members, out=rows)
        return rows.div_(self._before) if self._before != 1 else rows

    def _scatter(self) -> None:
        rows, group = self._rows, self._bucket.groups.sharded_group_info.group
        assert rows is not None
        if group is None:
            self._sum = rows.view(-1)
        else:
            self._sum = rows.new_empty(rows.shape[1])
            with self._bucket.traced("reduce"):
                self._work = primitives.reduce_scatter(self._sum, rows.view(-1), group, async_op=True)

    def step(self) -> bool:
        """Go on with what is in flight; True when the gradients are in place."""
        if self._stream is None:
            return self._advance()
        torch.get_device_module(self._bucket.device).current_stream().wait_event(self._event)
        self._rows = None
        if self._arriving is not None:
            self._event.synchronize()  # the program reads it, not a stream
            self._give(self._arriving)
        return True

    def abandon(self) -> None:
        """Let what is in flight arrive, and forget it."""
        if self._stream is not None:
            torch.get_device_module(self._bucket.device).current_stream().wait_event(self._event)
        elif self._work is not None:
            self._work.wait()

    @torch.no_grad()
    def _advance(self) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._stream is None:
                self._rows = None
        bucket = self._bucket
        group = bucket.groups.unsharded_group_info.group
        if group is not None and self._all_reduce is not None:
            if bucket.partial is not None:
                self._sum += bucket.partial
            bucket.partial = None if self._all_reduce else self._sum
            if not self._all_reduce:
                return True
            self._all_reduce = None
            with bucket.traced("reduce"):
                self._work = primitives.all_reduce(self._sum, group, async_op=True)
            return False
        if self._after != 1:
            self._sum.div_(self._after)
        shards = bucket.shards
        to_host = self._stream is not None and bucket.offloaded
        reduced = self._sum.to(shards.dtype).to(shards.device, non_blocking=to_host)
        if to_host:
            self._arriving = reduced
        else:
            self._give(reduced)
        return True

    def _give(self, reduced: torch.Tensor) -> None:
        """Add the reduced gradients to the sharded parameters."""
        *pieces, used = reduced.split(self._sizes)
        # Read only where this rank does not know the answer, as reading waits for the device.
        counts = used.tolist() if any(self._missing) else None
        for i, (param, piece) in enumerate(zip(self._params, pieces, strict=True)):
            if counts is None or not self._missing[i] or counts[i] > 0:
                if len(piece) != param.local_numel:
                    piece = piece[: param.local_numel]
                param.add_gradient(piece.view(param.local_shape))


def _by_rows(param: HSDPParam, grad: torch.Tensor) -> torch.Tensor:
    """The gradient with the members' parts one after the other along dim 0."""
    members = len(param.shards)
    if members == 1:
        return grad.reshape(1, -1)
    if param.stacked:
        return grad
    if param.even:
        return param.by_member(grad)
    rows = grad.new_zeros(members, param.slot)
    for member, (row, (start, stop)) in enumerate(zip(rows, param.shards, strict=True)):
        shape = param.shape_of(member)
        row[: math.prod(shape)].view(shape).copy_(grad.narrow(param.dim, start, stop - start))
    return rows
