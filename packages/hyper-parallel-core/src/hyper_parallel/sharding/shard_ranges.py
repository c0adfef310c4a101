"""Which global indices a rank holds.

Along one tensor dimension a rank holds a list of half-open intervals of global indices: one interval for ``Shard``,
one per section for ``PackedShard``. Uneven sizes follow ``torch.chunk``: later ranks hold less, or nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.sharding.placements import PackedShard

if TYPE_CHECKING:
    from hyper_parallel.sharding.layout import Layout

Intervals = tuple[tuple[int, int], ...]
Box = tuple[Intervals, ...]


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of chunk ``index`` when ``size`` elements are cut as ``torch.chunk(parts)`` cuts them."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def length(intervals: Intervals) -> int:
    """Number of indices in a list of intervals."""
    return sum(stop - start for start, stop in intervals)


def clip(intervals: Intervals, start: int, stop: int) -> Intervals:
    """The part of the concatenated intervals between positions ``start`` and ``stop``."""
    kept = []
    offset = 0
    for first, last in intervals:
        low, high = max(start - offset, 0), min(stop - offset, last - first)
        if low < high:
            kept.append((first + low, first + high))
        offset += last - first
    return tuple(kept)


def split_intervals(intervals: Intervals, placement: object, parts: int, index: int) -> Intervals:
    """What rank ``index`` of ``parts`` keeps of ``intervals`` under a shard placement."""
    if isinstance(placement, PackedShard):
        kept: list[tuple[int, int]] = []
        offset = 0
        for section in placement.sections:
            low, high = chunk_bounds(section, parts, index)
            kept.extend(clip(intervals, offset + low, offset + high))
            offset += section
        return tuple(kept)
    return clip(intervals, *chunk_bounds(length(intervals), parts, index))


def split_all(intervals: Intervals, placement: object, parts: int) -> list[Intervals]:
    """What each of ``parts`` ranks keeps of ``intervals``: :func:`split_intervals` for all of them."""
    if len(intervals) != 1 or isinstance(placement, PackedShard):
        return [split_intervals(intervals, placement, parts, index) for index in range(parts)]
    ((start, stop),) = intervals
    step = -(-(stop - start) // parts)
    return [((low, min(low + step, stop)),) if low < stop else () for low in range(start, start + parts * step, step)]


def dim_intervals(layout: Layout, shape: tuple[int, ...], dim: int, coordinate: tuple[int, ...]) -> Intervals:
    """Global indices along ``dim`` held by the rank at mesh ``coordinate``."""
    intervals: Intervals = ((0, shape[dim]),) if shape[dim] else ()
    for axis in layout.shard_order[dim]:
        intervals = split_intervals(intervals, layout.placements[axis], layout.mesh_shape[axis], coordinate[axis])
    return intervals


def box(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    """Global indices held by the rank at mesh ``coordinate``, one interval list per tensor dimension."""
    return tuple(dim_intervals(layout, shape, d, coordinate) for d in range(len(shape)))


def local_shape(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the local tensor of the rank at mesh ``coordinate``."""
    return tuple(
        length(dim_intervals(layout, shape, d, coordinate)) if layout.shard_order[d] else shape[d]
        for d in range(len(shape))
    )
