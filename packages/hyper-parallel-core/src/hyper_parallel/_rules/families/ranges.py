"""Interval arithmetic for operators that pick a range of one dimension: what each rank keeps and then holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import PackedShard, Placement, Shard
from hyper_parallel.sharding.shard_ranges import Intervals, dim_intervals, length


@dataclass(frozen=True)
class Kept:
    """A picked range that stays sharded where it is.

    Attributes:
        placements: of the result, for each mesh axis that shards the dimension.
        local: the picked part of this rank's piece.
    """

    placements: dict[int, Placement]
    local: slice


@dataclass(frozen=True)
class Overlap:
    """The picked elements that one rank holds: where in its piece, and where in the result."""

    local: slice
    result: slice


def overlaps(held: Intervals, picked: range) -> list[Overlap]:
    """The picked elements in a list of held intervals, one entry per interval that has any, in the order held."""
    found = []
    offset = 0
    for start, stop in held:
        first = max(-(-(start - picked.start) // picked.step), 0)
        last = min(-(-(stop - picked.start) // picked.step), len(picked))
        if first < last:
            low = offset + picked.start + first * picked.step - start
            high = low + (last - first - 1) * picked.step + 1
            found.append(Overlap(slice(low, high, picked.step), slice(first, last)))
        offset += stop - start
    return found


def keep_range(layout: Layout, shape: tuple[int, ...], dim: int, picked: range) -> Kept | None:
    """How ``picked`` of a sharded ``dim`` stays on the ranks that hold it; None when no placement describes the pieces.

    Reads only what all ranks know, so all ranks decide alike. An unsharded dimension is always kept.
    """
    axes = layout.shard_order[dim]
    if not axes:
        return Kept({}, slice(picked.start, picked.stop, picked.step))
    placed = {a: layout.placements[a] for a in axes}
    size = shape[dim]
    if picked == range(size):
        held_here = length(dim_intervals(layout, shape, dim, layout.info.my_coordinate()))
        return Kept(placed, slice(0, held_here))
    held = {c: dim_intervals(layout, shape, dim, c) for c in _coordinates(layout, axes)}
    parts = {c: overlaps(h, picked) for c, h in held.items()}
    for outermost in _results(placed[axes[0]], picked, dim):
        result = {a: Shard(dim) if i else outermost for i, a in enumerate(axes)}
        after = layout.with_order(tuple(result.get(a, p) for a, p in enumerate(layout.placements)), layout.shard_order)
        new_shape = (*shape[:dim], len(picked), *shape[dim + 1 :])
        if all(_joined(p) == merged(dim_intervals(after, new_shape, dim, c)) for c, p in parts.items()):
            if all(_contiguous(p) for p in parts.values()):
                here = layout.info.my_coordinate()
                return Kept(dict(result), _local_slice(overlaps(dim_intervals(layout, shape, dim, here), picked)))
    return None


def _results(outermost: Placement, picked: range, dim: int) -> Iterator[Placement]:
    """Placements that the result may have on the outermost axis."""
    yield Shard(dim)
    if isinstance(outermost, PackedShard):
        bounds = list(itertools.accumulate(outermost.sections, initial=0))
        lengths = [len(_within(picked, a, b)) for a, b in itertools.pairwise(bounds)]
        yield PackedShard(dim, tuple(n for n in lengths if n) or (0,))


def _within(picked: range, start: int, stop: int) -> range:
    first = max(-(-(start - picked.start) // picked.step), 0)
    last = min(-(-(stop - picked.start) // picked.step), len(picked))
    return picked[first : max(first, last)]


def _coordinates(layout: Layout, axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Mesh coordinates that differ along the given axes only."""
    base = [0] * len(layout.mesh_shape)
    for position in itertools.product(*(range(layout.mesh_shape[a]) for a in axes)):
        for axis, index in zip(axes, position, strict=True):
            base[axis] = index
        yield tuple(base)


def _joined(parts: list[Overlap]) -> Intervals:
    """Result intervals of the parts, as they lie one after the other in the local result."""
    return merged((p.result.start, p.result.stop) for p in parts)


def merged(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Without empty intervals, and neighbours made one."""
    found: list[tuple[int, int]] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _contiguous(parts: list[Overlap]) -> bool:
    """Whether one local slice takes all parts."""
    return all(b.local.start == a.local.stop - 1 + a.local.step for a, b in itertools.pairwise(parts))


def _local_slice(parts: list[Overlap]) -> slice:
    return slice(parts[0].local.start, parts[-1].local.stop, parts[0].local.step) if parts else slice(0, 0)
