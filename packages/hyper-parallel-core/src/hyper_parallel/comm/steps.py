"""The steps of which every change of layout is made: slices and paddings, and one class per collective."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hyper_parallel.comm import primitives as comm
from hyper_parallel.comm.reduce_ops import wire
from hyper_parallel.sharding.mesh import AxisGroup

Segments = tuple[tuple[int, int], ...]  # (start, length) in local indices, one tuple per tensor dim


class Pending(Protocol):
    """A collective in flight; :meth:`wait` completes ``out`` in place."""

    out: torch.Tensor

    def wait(self) -> None: ...


class _Work:
    """A collective that writes the result; or, with ``finish``, buffers from which that function makes it."""

    def __init__(self, out: torch.Tensor, work: Any, finish: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.out, self._work, self._finish = out, work, finish
        # By the time it is written the result may have history; this is the same memory without.
        self._written = out if finish is None else out.detach()

    def wait(self) -> None:
        if self._finish is not None:
            self._work.wait()
            self._finish(self._written)
            return
        with torch.no_grad():  # gloo's wait copies into the result
            self._work.wait()


class CastResult:
    """A pending result in another dtype than that on the wire."""

    def __init__(self, inner: Pending, dtype: torch.dtype) -> None:
        self._inner, self.out = inner, torch.empty_like(inner.out, dtype=dtype)

    def wait(self) -> None:
        self._inner.wait()
        with torch.no_grad():
            self.out.copy_(self._inner.out)


class Step:
    """One step of a plan; ``collective`` says whether it communicates, the same on all ranks."""

    collective: bool = False

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Do the step."""
        started = self.start(x)
        started.wait()
        return started.out

    def start(self, x: torch.Tensor) -> Pending:
        """Begin the step's collective."""
        raise AssertionError(f"{type(self).__name__} has no collective")


class SliceStep(Step):
    """Replicate to Shard: keep this rank's part of one dim; no communication."""

    def __init__(self, dim: int, segments: tuple[tuple[int, int], ...]) -> None:
        self.dim, self.segments = dim, segments

    def run(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x.narrow(self.dim, start, size) for start, size in self.segments]
        if len(parts) == 1:
            # A copy, so that the shard does not keep the whole tensor alive.
            return parts[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(parts, self.dim) if parts else x.narrow(self.dim, 0, 0).clone()


class ZeroPad(Step):
    """Shard to Partial: the slice in its place, zeros elsewhere; no communication."""

    def __init__(self, dim: int, size: int, segments: tuple[tuple[int, int], ...]) -> None:
        self.dim, self.size, self.segments = dim, size, segments

    def run(self, x: torch.Tensor) -> torch.Tensor:
        shape = list(x.shape)
        shape[self.dim] = self.size
        out = x.new_zeros(shape)
        offset = 0
        for start, size in self.segments:
            out.narrow(self.dim, start, size).copy_(x.narrow(self.dim, offset, size))
            offset += size
        return out


class KeepFirst(Step):
    """Replicate to Partial: the value on the first rank of each axis, the neutral element elsewhere."""

    def __init__(self, first: bool, neutral: int) -> None:
        self.first, self.neutral = first, neutral

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if self.first else torch.full_like(x, self.neutral)


class AllReduce(Step):
    """Partial to Replicate over one or several axes together."""

    collective = True

    def __init__(self, group: AxisGroup, op: str) -> None:
        self.group, self.op = group, op

    def start(self, x: torch.Tensor) -> Pending:
        form = wire(self.op, x.dtype)
        if form.encode is None or form.decode is None:
            out = x.clone(memory_format=torch.contiguous_format)
            return _Work(out, comm.all_reduce(out, self.group, form.op, async_op=True))
        sent, decode = form.encode(x).contiguous(), form.decode
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        work = comm.all_reduce(sent, self.group, form.op, async_op=True)
        return _Work(out, work, lambda written: written.copy_(decode(sent)))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        form = wire(self.op, x.dtype)
        if form.encode is None or form.decode is None:
            out = x.clone(memory_format=torch.contiguous_format)
            comm.all_reduce(out, self.group, form.op)
            return out
        sent = form.encode(x).contiguous()
        comm.all_reduce(sent, self.group, form.op)
        return form.decode(sent)


class ReduceScatter(Step):
    """Partial to Shard: every rank keeps the sum of its own part of one dim."""

    collective = True

    def __init__(self, group: AxisGroup, op: str, dim: int, parts: list[tuple[tuple[int, int], ...]]) -> None:
        self.group, self.op, self.dim, self.parts = group, op, dim, parts
        self.sizes = [length_of(p) for p in parts]
        self.widest = max(self.sizes)
        starts = itertools.accumulate(self.sizes, initial=0)
        ordered = zip(starts, self.sizes, strict=False)
        self.even = len(set(self.sizes)) == 1 and all(p == (want,) for p, want in zip(parts, ordered, strict=True))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        form = wire(self.op, x.dtype)
        if form.encode is not None:
            x = form.encode(x)
        out = self._buffer(x)
        comm.reduce_scatter(out, self._stacked(x), self.group, form.op)
        out = self._trimmed(out)
        return out if form.decode is None else form.decode(out)

    def start(self, x: torch.Tensor) -> Pending:
        form = wire(self.op, x.dtype)
        sent = x if form.encode is None else form.encode(x)
        buffer = self._buffer(sent)
        work = comm.reduce_scatter(buffer, self._stacked(sent), self.group, form.op, async_op=True)
        decode = form.decode
        if decode is None and self._is_widest():
            return _Work(buffer, work)
        out = x.new_empty(self._trimmed(buffer).shape)
        return _Work(
            out,
            work,
            lambda written: written.copy_(self._trimmed(buffer) if decode is None else decode(self._trimmed(buffer))),
        )

    def _buffer(self, x: torch.Tensor) -> torch.Tensor:
        shape = list(x.shape)
        shape[self.dim] = self.widest
        return x.new_empty(shape)

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        """The members' parts one after the other along dim 0, which is what the collective reads."""
        if self.even:
            # cat keeps the memory order of its inputs when that is channels_last.
            return (x if self.dim == 0 else torch.cat(x.chunk(self.group.size, self.dim))).contiguous()
        shape = list(x.shape)
        shape[self.dim] = self.widest
        stacked = x.new_zeros([self.group.size, *shape])
        for slot, part in zip(stacked, self.parts, strict=True):
            offset = 0
            for start, count in part:
                slot.narrow(self.dim, offset, count).copy_(x.narrow(self.dim, start, count))
                offset += count
        return stacked.flatten(0, 1)

    def _is_widest(self) -> bool:
        return self.sizes[self.group.rank] == self.widest

    def _trimmed(self, out: torch.Tensor) -> torch.Tensor:
        return out if self._is_widest() else out.narrow(self.dim, 0, self.sizes[self.group.rank]).contiguous()


class AllGather(Step):
    """Shard to Replicate over one or several axes and dims together: every rank gets the others' blocks."""

    collective = True

    def __init__(self, group: AxisGroup, shape: tuple[int, ...], blocks: list[tuple[Segments, ...]]) -> None:
        self.group, self.shape, self.blocks = group, shape, blocks
        self.block_shapes = [tuple(map(length_of, block)) for block in blocks]
        self.widest = tuple(max(sizes) for sizes in zip(*self.block_shapes, strict=True))
        self.even = all(s == self.widest for s in self.block_shapes)
        split = [d for d, size in enumerate(shape) if any(b[d] != ((0, size),) for b in blocks)]
        ordered = (
            self.even
            and len(split) == 1
            and all(
                block[split[0]] == ((i * self.widest[split[0]], self.widest[split[0]]),)
                for i, block in enumerate(blocks)
            )
        )
        self.cat_dim = split[0] if ordered else None
        # The members' blocks one after the other along dim 0, which is what the collective writes.
        self.stacked_shape = (group.size * self.widest[0], *self.widest[1:])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        stacked = x.new_empty(self.stacked_shape)
        comm.all_gather(stacked, self._padded(x), self.group)
        return self._assembled(stacked, None)

    def start(self, x: torch.Tensor) -> Pending:
        stacked = x.new_empty(self.stacked_shape)
        work = comm.all_gather(stacked, self._padded(x), self.group, async_op=True)
        if self.cat_dim == 0:
            return _Work(stacked, work)
        out = x.new_empty(self.shape)
        return _Work(out, work, lambda written: self._assembled(stacked, written))

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        if self.even:
            return x.contiguous()
        padded = x.new_zeros(self.widest)
        padded[tuple(slice(0, n) for n in x.shape)] = x
        return padded

    def _assembled(self, stacked: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if self.cat_dim == 0:
            return stacked
        pieces = stacked.chunk(self.group.size)
        if self.cat_dim is not None:
            return torch.cat(pieces, self.cat_dim, out=out)
        out = stacked.new_empty(self.shape) if out is None else out
        for piece, block, sizes in zip(pieces, self.blocks, self.block_shapes, strict=True):
            put(out, block, piece[tuple(slice(0, n) for n in sizes)])
        return out


class AllToAll(Step):
    """Any shards to any other shards: one all-to-all with exactly the blocks that change rank."""

    collective = True

    def __init__(self, group: AxisGroup, shape: tuple[int, ...], sends: list[Any], receives: list[Any]) -> None:
        self.group, self.shape, self.sends, self.receives = group, shape, sends, receives
        self.in_splits = [0 if s is None else math.prod(map(length_of, s)) for s in sends]
        self.out_splits = [0 if r is None else math.prod(map(length_of, r[1])) for r in receives]

    def start(self, x: torch.Tensor) -> Pending:
        parts = [take(x, s).reshape(-1) for s in self.sends if s is not None]
        packed = torch.cat(parts) if parts else x.new_empty(0)
        buffer = x.new_empty(sum(self.out_splits))
        out = x.new_empty(self.shape)
        work = comm.all_to_all(buffer, packed, self.out_splits, self.in_splits, self.group, async_op=True)
        return _Work(out, work, lambda written: self._assemble(written, buffer))

    def _assemble(self, out: torch.Tensor, buffer: torch.Tensor) -> None:
        for receive, part in zip(self.receives, buffer.split(self.out_splits), strict=True):
            if receive is not None:
                put(out, receive[1], part.view([length_of(d) for d in receive[1]]))


# -- blocks -------------------------------------------------------------------------------------------------------


def length_of(segments: tuple[tuple[int, int], ...]) -> int:
    """Number of indices in a list of (start, length) segments."""
    return segments[0][1] if len(segments) == 1 else sum(size for _, size in segments)


def take(x: torch.Tensor, block: tuple[Segments, ...]) -> torch.Tensor:
    """The sub-tensor at the product of per-dim segments."""
    for dim, segments in enumerate(block):
        parts = [x.narrow(dim, start, size) for start, size in segments]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


def put(out: torch.Tensor, block: tuple[Segments, ...], piece: torch.Tensor) -> None:
    """Write ``piece`` at the product of per-dim segments of ``out``."""
    offsets = [list(itertools.accumulate((s for _, s in segments), initial=0)) for segments in block]
    for choice in itertools.product(*(range(len(segments)) for segments in block)):
        target, source = out, piece
        for dim, index in enumerate(choice):
            start, size = block[dim][index]
            target = target.narrow(dim, start, size)
            source = source.narrow(dim, offsets[dim][index], size)
        target.copy_(source)
