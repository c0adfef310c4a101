"""From one layout to another, on local tensors: the planner that picks the collectives.

The plan uses the fewest bytes and merges what it can. In order: slices (free), reduce-scatters, zero padding (free),
one all-reduce per reduce op over all remaining pending axes together, then *one* all-gather or, when shards change
dimension or order, *one* all-to-all that sends exactly the blocks that move. Mesh axes of size 1 cost nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from hyper_parallel.comm.rank_blocks import InCommon, coordinates_on, nested_shards, segments_in_common
from hyper_parallel.comm.reduce_ops import norm_order
from hyper_parallel.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    KeepFirst,
    Pending,
    ReduceScatter,
    SliceStep,
    Step,
    ZeroPad,
)
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import AxisGroup
from hyper_parallel.sharding.placements import Partial, Placement, Replicate, is_partial, is_shard
from hyper_parallel.sharding.shard_ranges import Intervals, box, dim_intervals, length, split_intervals

__all__ = ["TransitionPlan", "plan_transition"]


# -- the planner --------------------------------------------------------------------------------------------------


class TransitionPlan:
    """The steps from one layout to another for tensors of one global shape, as seen by this rank."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
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
def plan_transition(src: Layout, dst: Layout, shape: tuple[int, ...]) -> TransitionPlan:
    """The cheapest steps from ``src`` to ``dst`` (both on one mesh, bound) for a tensor of global ``shape``."""
    current, target = _drop_unit_axes(src), _drop_unit_axes(dst)
    steps: list[Step] = []
    if current is not target:
        builder = _Builder(current, target, shape, steps)
        builder.build()
    return TransitionPlan(steps)


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
                self.steps.append(SliceStep(dim, segments))
                self.current = self.current.with_placements({axis: want})

    def _reduce_scatter(self, dim: int, rest: tuple[int, ...], kind: Partial) -> None:
        nested = tuple(itertools.takewhile(lambda a: self.current.placements[a] == kind, rest))
        group = self.info.group(tuple(sorted(nested)))
        wants = [self.target.placements[a] for a in nested]
        size = self._dim_length(dim)
        shards = ((want, self.info.shape[a], range(self.info.shape[a])) for want, a in zip(wants, nested, strict=True))
        held = nested_shards(((0, size),) if size else (), shards)
        segments = {index: tuple((a, b - a) for a, b in intervals) for index, intervals in held.items()}
        parts = [segments[index] for index in map(coordinates_on(nested), group.coordinates)]
        self.steps.append(ReduceScatter(group, kind.reduce_op, dim, parts))
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
            self.steps.append(AllReduce(self.info.group(tuple(axes)), op))
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
        order = tuple(tuple(a for a in axes if is_shard(placements[a])) for axes in self.target.shard_order)
        goal = current.with_order(placements, order)
        if goal is current:
            return
        changed = _changed_axes(current, goal)
        group = self.info.group(changed)
        mine = box(goal, self.shape, self.here)
        shape = tuple(length(i) for i in mine)
        columns = segments_in_common(current, self.shape, group, mine)
        only_removed = all(
            _starts_with(have, want, current, goal)
            for have, want in zip(current.shard_order, goal.shard_order, strict=True)
        )
        if only_removed:
            in_mine = [[() if common is None else common[1] for common in column] for column in columns]
            blocks = list(zip(*in_mine, strict=True))
            self.steps.append(AllGather(group, shape, blocks))
        else:
            self.steps.append(self._exchange(group, columns, shape, goal))
        self.current = goal

    def _exchange(
        self, group: AxisGroup, wanted: list[list[InCommon | None]], shape: tuple[int, ...], goal: Layout
    ) -> AllToAll:
        """Each member gets what it wants of a block from itself, or from one of those that hold the block, in turns."""
        current, me = self.current, group.rank
        held = coordinates_on(a for a in group.axes if is_shard(current.placements[a]))
        blocks = list(map(held, group.coordinates))
        holders: dict[Any, int] = dict.fromkeys(blocks, 0)
        turns = []
        for block in blocks:
            turns.append(holders[block])
            holders[block] += 1
        copies = holders[blocks[me]]  # the same for all blocks
        theirs = segments_in_common(goal, self.shape, group, box(current, self.shape, self.here))
        sends: list[Any] = [None] * group.size
        receives: list[Any] = [None] * group.size
        for member, (block, turn) in enumerate(zip(blocks, turns, strict=True)):
            if member == me or (block != blocks[me] and turn == me % copies):
                common = [column[member] for column in wanted]
                if None not in common:
                    receives[member] = tuple(zip(*common, strict=True)) or ((), ())
            if member == me or (block != blocks[me] and turns[me] == member % copies):
                common = [column[member] for column in theirs]
                if None not in common:
                    sends[member] = tuple(c[1] for c in common if c is not None)
        return AllToAll(group, shape, sends, receives)

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
