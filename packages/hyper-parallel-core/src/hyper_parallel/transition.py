"""From one layout to another, on local tensors: the planner that picks the collectives, and the steps that run them.

The plan uses the fewest bytes and merges what it can. In order: slices (free), reduce-scatters, zero padding (free),
one all-reduce per reduce op over all remaining pending axes together, then *one* all-gather or, when shards change
dimension or order, *one* all-to-all that sends exactly the blocks that move. Mesh axes of size 1 cost nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

from hyper_parallel import comm
from hyper_parallel.boxes import Box, Intervals, box, dim_intervals, length, split_intervals
from hyper_parallel.layout import Layout
from hyper_parallel.mesh import AxisGroup
from hyper_parallel.placements import Partial, Placement, Replicate, is_partial, is_shard
from hyper_parallel.wire import norm_order, wire

Segments = tuple[tuple[int, int], ...]  # (start, length) in local indices, one tuple per tensor dim


class Pending(Protocol):
    """A collective in flight; :meth:`wait` completes ``out`` in place."""

    out: torch.Tensor

    def wait(self) -> None: ...


class _Work:
    def __init__(self, out: torch.Tensor, work: Any, finish: Any = None) -> None:
        self.out, self._work, self._finish = out, work, finish

    def wait(self) -> None:
        with torch.no_grad():  # gloo's wait copies into the result, which by now may have history
            self._work.wait()
            if self._finish is not None:
                self._finish()


class Cast:
    """A pending result in another dtype than that on the wire."""

    def __init__(self, inner: Pending, dtype: torch.dtype) -> None:
        self._inner, self.out = inner, torch.empty_like(inner.out, dtype=dtype)

    def wait(self) -> None:
        self._inner.wait()
        with torch.no_grad():
            self.out.copy_(self._inner.out)


class Step:
    """One step of a plan.

    ``collective`` is the same on all ranks. ``cost``, the elements that this rank sends and receives, is not: no decision
    may rest on it.
    """

    collective: bool = False
    cost: int = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Do the step."""
        started = self.start(x)
        started.wait()
        return started.out

    def start(self, x: torch.Tensor) -> Pending:
        """Begin the step's collective."""
        raise AssertionError(f"{type(self).__name__} has no collective")


class Slice(Step):
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

    def __init__(self, group: AxisGroup, op: str, numel: int) -> None:
        self.group, self.op, self.cost = group, op, 2 * numel

    def start(self, x: torch.Tensor) -> Pending:
        form = wire(self.op, x.dtype)
        if form.encode is None or form.decode is None:
            out = x.clone(memory_format=torch.contiguous_format)
            return _Work(out, comm.all_reduce(out, self.group, form.op, async_op=True))
        sent, decode = form.encode(x).contiguous(), form.decode
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        work = comm.all_reduce(sent, self.group, form.op, async_op=True)
        return _Work(out, work, lambda: out.copy_(decode(sent)))

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

    def __init__(self, group: AxisGroup, op: str, dim: int, parts: list[tuple[tuple[int, int], ...]], numel: int) -> None:
        self.group, self.op, self.dim, self.parts, self.cost = group, op, dim, parts, numel
        self.sizes = [length_of(p) for p in parts]
        self.widest = max(self.sizes)
        ordered = [(sum(self.sizes[:i]), n) for i, n in enumerate(self.sizes)]
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
        return _Work(out, work, lambda: out.copy_(self._trimmed(buffer) if decode is None else decode(self._trimmed(buffer))))

    def _buffer(self, x: torch.Tensor) -> torch.Tensor:
        shape = list(x.shape)
        shape[self.dim] = self.widest
        return x.new_empty(shape)

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        """The members' parts one after the other along dim 0, which is what the collective reads."""
        if self.even:
            return x.contiguous() if self.dim == 0 else torch.cat(x.chunk(self.group.size, self.dim))
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
        self.group, self.shape, self.blocks, self.cost = group, shape, blocks, math.prod(shape)
        self.block_shapes = [tuple(length_of(s) for s in block) for block in blocks]
        self.widest = tuple(max(sizes) for sizes in zip(*self.block_shapes, strict=True))
        self.even = all(s == self.widest for s in self.block_shapes)
        split = [d for d, size in enumerate(shape) if any(b[d] != ((0, size),) for b in blocks)]
        ordered = self.even and len(split) == 1 and all(
            block[split[0]] == ((i * self.widest[split[0]], self.widest[split[0]]),) for i, block in enumerate(blocks)
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
        return _Work(out, work, lambda: self._assembled(stacked, out))

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


class Exchange(Step):
    """Any shards to any other shards: one all-to-all with exactly the blocks that change rank."""

    collective = True

    def __init__(self, group: AxisGroup, shape: tuple[int, ...], sends: list[Any], receives: list[Any]) -> None:
        self.group, self.shape, self.sends, self.receives = group, shape, sends, receives
        self.in_splits = [0 if s is None else math.prod(length_of(d) for d in s) for s in sends]
        self.out_splits = [0 if r is None else math.prod(length_of(d) for d in r[1]) for r in receives]
        me = group.rank
        self.cost = sum(self.out_splits) - self.out_splits[me]

    def start(self, x: torch.Tensor) -> Pending:
        parts = [take(x, s).reshape(-1) for s in self.sends if s is not None]
        packed = torch.cat(parts) if parts else x.new_empty(0)
        buffer = x.new_empty(sum(self.out_splits))
        out = x.new_empty(self.shape)
        work = comm.all_to_all(buffer, packed, self.out_splits, self.in_splits, self.group, async_op=True)
        return _Work(out, work, lambda: self._assemble(out, buffer))

    def _assemble(self, out: torch.Tensor, buffer: torch.Tensor) -> None:
        for receive, part in zip(self.receives, buffer.split(self.out_splits), strict=True):
            if receive is not None:
                put(out, receive[1], part.view([length_of(d) for d in receive[1]]))


# -- blocks -------------------------------------------------------------------------------------------------------


def length_of(segments: tuple[tuple[int, int], ...]) -> int:
    """Number of indices in a list of (start, length) segments."""
    return sum(size for _, size in segments)


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


def _overlap(held: Intervals, wanted: Intervals) -> list[tuple[int, int, int]]:
    """Common indices of two interval lists as (position in held, position in wanted, length), in global order."""
    common = []
    held_offset = 0
    for a, b in held:
        wanted_offset = 0
        for c, d in wanted:
            low, high = max(a, c), min(b, d)
            if low < high:
                common.append((low, held_offset + low - a, wanted_offset + low - c, high - low))
            wanted_offset += d - c
        held_offset += b - a
    return [(h, w, n) for _, h, w, n in sorted(common)]


def _block_overlap(held: Box, wanted: Box) -> tuple[tuple[Segments, ...], tuple[Segments, ...]] | None:
    """The common block of two boxes in the local indices of either; None when they are disjoint."""
    in_held, in_wanted = [], []
    for h, w in zip(held, wanted, strict=True):
        common = _overlap(h, w)
        if not common:
            return None
        in_held.append(tuple((a, n) for a, _, n in common))
        in_wanted.append(tuple((b, n) for _, b, n in common))
    return tuple(in_held), tuple(in_wanted)


# -- the planner --------------------------------------------------------------------------------------------------


class Plan:
    """The steps from one layout to another for tensors of one global shape, as seen by this rank."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.cost = sum(step.cost for step in steps)
        self.communicates = any(step.collective for step in steps)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The local tensor in the new layout; ``x`` itself when there is nothing to do."""
        for step in self.steps:
            x = step.run(x)
        return x

    def start(self, x: torch.Tensor) -> Pending | torch.Tensor:
        """Run up to the last step; return that step in flight when it communicates, else the result."""
        for step in self.steps[:-1]:
            x = step.run(x)
        if not self.steps:
            return x
        last = self.steps[-1]
        return last.start(x) if last.collective else last.run(x)


@lru_cache(maxsize=8192)
def plan_transition(src: Layout, dst: Layout, shape: tuple[int, ...]) -> Plan:
    """The cheapest steps from ``src`` to ``dst`` (both on one mesh, bound) for a tensor of global ``shape``."""
    current, target = _drop_unit_axes(src), _drop_unit_axes(dst)
    steps: list[Step] = []
    if current is not target:
        builder = _Builder(current, target, shape, steps)
        builder.build()
    return Plan(steps)


def _drop_unit_axes(layout: Layout) -> Layout:
    unit = {a: Replicate() for a, n in enumerate(layout.mesh_shape) if n == 1}
    return layout.with_placements(unit) if unit else layout


def _starts_with(order: tuple[int, ...], prefix: tuple[int, ...], a: Layout, b: Layout) -> bool:
    return order[: len(prefix)] == prefix and all(a.placements[x] == b.placements[x] for x in prefix)


class _Builder:
    def __init__(self, current: Layout, target: Layout, shape: tuple[int, ...], steps: list[Step]) -> None:
        self.current, self.target, self.shape, self.steps = current, target, shape, steps
        self.info = current.info
        self.here = self.info.my_coordinate()

    def build(self) -> None:
        self._slice(stop_at_partial=True)
        self._slice(stop_at_partial=False)
        self._zero_pad()
        self._all_reduce()
        self._move_shards()
        self._keep_first()
        assert self.current is self.target, (self.current, self.target)

    def _local_numel(self) -> int:
        return math.prod(length(i) if self.shape[d] else 0 for d, i in enumerate(box(self.current, self.shape, self.here)))

    def _dim_length(self, dim: int) -> int:
        return length(dim_intervals(self.current, self.shape, dim, self.here))

    def _pieces(self, dim: int, placements: list[tuple[Placement, int, int]]) -> tuple[tuple[int, int], ...]:
        """Segments of the current local dim kept after nested shards, each (placement, parts, index)."""
        size = self._dim_length(dim)
        intervals: Intervals = ((0, size),) if size else ()
        for placement, parts, index in placements:
            intervals = split_intervals(intervals, placement, parts, index)
        return tuple((a, b - a) for a, b in intervals)

    def _slice(self, stop_at_partial: bool) -> None:
        for dim, wanted in enumerate(self.target.shard_order):
            while True:
                have = self.current.shard_order[dim]
                if len(have) >= len(wanted) or not _starts_with(wanted, have, self.target, self.current):
                    break
                axis = wanted[len(have)]
                now, want = self.current.placements[axis], self.target.placements[axis]
                if is_shard(now) or (is_partial(now) and stop_at_partial):
                    break
                if is_partial(now):
                    self._reduce_scatter(dim, wanted[len(have) :], now)
                    continue
                segments = self._pieces(dim, [(want, self.info.shape[axis], self.here[axis])])
                self.steps.append(Slice(dim, segments))
                self.current = self.current.with_placements({axis: want})

    def _reduce_scatter(self, dim: int, rest: tuple[int, ...], kind: Partial) -> None:
        nested = tuple(itertools.takewhile(lambda a: self.current.placements[a] == kind, rest))
        group = self.info.group(tuple(sorted(nested)))
        wants = [self.target.placements[a] for a in nested]
        parts = [
            self._pieces(dim, [(w, self.info.shape[a], c[a]) for w, a in zip(wants, nested, strict=True)])
            for c in group.coordinates
        ]
        self.steps.append(ReduceScatter(group, kind.reduce_op, dim, parts, self._local_numel()))
        self.current = self.current.with_placements(dict(zip(nested, wants, strict=True)))

    def _zero_pad(self) -> None:
        for dim in range(len(self.shape)):
            while self.current.shard_order[dim]:
                axis = self.current.shard_order[dim][-1]
                if self.target.placements[axis] != Partial():
                    break
                whole = self.current.with_placements({axis: Replicate()})
                inner = (self.current.placements[axis], self.info.shape[axis], self.here[axis])
                self.current, shard = whole, self.current
                self.steps.append(ZeroPad(dim, self._dim_length(dim), self._pieces(dim, [inner])))
                self.current = shard.with_placements({axis: Partial()})

    def _all_reduce(self) -> None:
        pending: dict[str, list[int]] = {}
        for axis, placement in enumerate(self.current.placements):
            if is_partial(placement) and placement != self.target.placements[axis]:
                pending.setdefault(placement.reduce_op, []).append(axis)
        for op, axes in pending.items():
            self.steps.append(AllReduce(self.info.group(tuple(axes)), op, self._local_numel()))
            self.current = self.current.with_placements({a: Replicate() for a in axes})
        if pending:
            self._slice(stop_at_partial=True)

    def _move_shards(self) -> None:
        current = self.current
        # Axes that end as Partial are brought to Replicate first; what stays Partial does not move.
        placements = tuple(
            c if is_partial(c) else Replicate() if is_partial(t) else t
            for c, t in zip(current.placements, self.target.placements, strict=True)
        )
        order = tuple(
            tuple(a for a in axes if is_shard(placements[a])) for axes in self.target.shard_order
        )
        goal = current.with_order(placements, order)
        if goal is current:
            return
        changed = _changed_axes(current, goal)
        group = self.info.group(changed)
        boxes = [box(current, self.shape, c) for c in group.coordinates]
        mine = box(goal, self.shape, self.here)
        shape = tuple(length(i) for i in mine)
        only_removed = all(
            _starts_with(have, want, current, goal)
            for have, want in zip(current.shard_order, goal.shard_order, strict=True)
        )
        if only_removed:
            blocks = []
            for b in boxes:
                overlap = [_overlap(h, w) for h, w in zip(b, mine, strict=True)]
                blocks.append(tuple(tuple((w, n) for _, w, n in dim) for dim in overlap))
            self.steps.append(AllGather(group, shape, blocks))
        else:
            self.steps.append(self._exchange(group, boxes, shape, goal))
        self.current = goal

    def _exchange(self, group: AxisGroup, boxes: list[Box], shape: tuple[int, ...], goal: Layout) -> Exchange:
        holders: dict[Box, list[int]] = {}
        for member, b in enumerate(boxes):
            holders.setdefault(b, []).append(member)
        goals = [box(goal, self.shape, c) for c in group.coordinates]
        me = group.rank
        sends: list[Any] = [None] * group.size
        receives: list[Any] = [None] * group.size
        for held, members in holders.items():
            for member, wanted in enumerate(goals):
                source = member if member in members else members[member % len(members)]
                if me not in (source, member):
                    continue
                common = _block_overlap(held, wanted)
                if common is None:
                    continue
                if source == me:
                    sends[member] = common[0]
                if member == me:
                    receives[source] = common
        return Exchange(group, shape, sends, receives)

    def _keep_first(self) -> None:
        neutral = {"sum": 0, "product": 1}
        by_op: dict[str, list[int]] = {}
        for axis, want in enumerate(self.target.placements):
            if is_partial(want) and self.current.placements[axis] != want:
                by_op.setdefault(want.reduce_op, []).append(axis)
        for op, axes in by_op.items():
            if op in neutral or norm_order(op) is not None:  # avg, max and min of equal values are that value
                self.steps.append(KeepFirst(all(self.here[a] == 0 for a in axes), neutral.get(op, 0)))
            self.current = self.current.with_placements({a: self.target.placements[a] for a in axes})


def _changed_axes(a: Layout, b: Layout) -> tuple[int, ...]:
    """Axes whose ranks must talk: those after the common outer shards of some dim in either layout."""
    axes: set[int] = set()
    for have, want in zip(a.shard_order, b.shard_order, strict=True):
        common = 0
        while (
            common < min(len(have), len(want))
            and have[common] == want[common]
            and a.placements[have[common]] == b.placements[have[common]]
        ):
            common += 1
        axes.update(have[common:], want[common:])
    return tuple(sorted(axes))
