"""Which blocks of a tensor the members of a group have in common with this rank, in time linear in their number.

Along one tensor dimension a rank's intervals follow from its coordinates on the mesh axes that shard this dimension
alone. So they are worked out once per dimension and coordinates, axis by axis, and looked up for every member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from hyper_parallel.comm.steps import Segments
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import AxisGroup
from hyper_parallel.sharding.placements import Placement
from hyper_parallel.sharding.shard_ranges import Box, Intervals, split_all

__all__ = ["Coordinate", "coordinates_on", "nested_shards", "overlap", "segments_in_common"]

Coordinate = tuple[int, ...]
InCommon = tuple[Segments, Segments]  # of the member and of this rank, in their local indices


def overlap(theirs: Intervals, mine: Intervals) -> InCommon | None:
    """The common indices of two ascending interval lists as segments of either; None when there are none."""
    if len(theirs) == 1 == len(mine):  # nearly always
        ((a, b),), ((c, d),) = theirs, mine
        low, high = max(a, c), min(b, d)
        return (((low - a, high - low),), ((low - c, high - low),)) if low < high else None
    in_theirs, in_mine = [], []
    i = j = their_offset = my_offset = 0
    while i < len(theirs) and j < len(mine):
        (a, b), (c, d) = theirs[i], mine[j]
        low, high = max(a, c), min(b, d)
        if low < high:
            in_theirs.append((their_offset + low - a, high - low))
            in_mine.append((my_offset + low - c, high - low))
        if b <= d:
            i, their_offset = i + 1, their_offset + b - a
        else:
            j, my_offset = j + 1, my_offset + d - c
    return (tuple(in_theirs), tuple(in_mine)) if in_mine else None


def coordinates_on(axes: Iterable[int]) -> Callable[[Coordinate], Any]:
    """A function that takes from a mesh coordinate what it says on some axes; as fast as Python has it."""
    axes = tuple(axes)
    return itemgetter(*axes) if axes else _nothing


def _nothing(coordinate: Coordinate) -> tuple[()]:
    return ()


def nested_shards(whole: Intervals, shards: Iterable[tuple[Placement, int, Iterable[int]]]) -> dict[Any, Intervals]:
    """What ranks keep of ``whole`` under nested shards, by their indices as :func:`coordinates_on` gives them.

    Args:
        shards: outermost first: placement, number of parts, and the indices that are asked for.
    """
    held: dict[Coordinate, Intervals] = {(): whole}
    depth = 0
    for placement, parts, indices in shards:
        depth += 1
        cut = {key: split_all(intervals, placement, parts) for key, intervals in held.items()}
        held = {(*key, index): pieces[index] for key, pieces in cut.items() for index in indices}
    return {key[0]: intervals for key, intervals in held.items()} if depth == 1 else dict(held)


def segments_in_common(
    layout: Layout, shape: tuple[int, ...], group: AxisGroup, mine: Box
) -> list[list[InCommon | None]]:
    """Per tensor dimension what each member of a group, which lies as ``layout`` says, has in common with ``mine``."""
    here = group.coordinates[group.rank]
    columns = []
    for dim, (size, wanted) in enumerate(zip(shape, mine, strict=True)):
        axes = layout.shard_order[dim]
        shards = (
            (layout.placements[a], layout.mesh_shape[a], range(layout.mesh_shape[a]) if a in group.axes else (here[a],))
            for a in axes
        )
        held = nested_shards(((0, size),) if size else (), shards)
        common = {key: overlap(intervals, wanted) for key, intervals in held.items()}
        columns.append([common[key] for key in map(coordinates_on(axes), group.coordinates)])
    return columns
