"""Elements along a dimension that go with those of a tensor of another size: ``scatter`` by a smaller index."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyper_parallel.boxes import dim_intervals
from hyper_parallel.families.moving import Move, indices_of
from hyper_parallel.layout import Layout

__all__ = ["aligned"]


def aligned(
    layout: Layout, shape: tuple[int, ...], like: Layout, like_shape: tuple[int, ...], dim: int, size: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function from this rank's piece of one tensor to the elements, along ``dim``, with the numbers that another
    tensor has there on this rank, as far as they are below ``size``.

    Costs 1 all-to-all of those that are not here yet.
    """

    def wanted(coordinate: tuple[int, ...]) -> torch.Tensor:
        numbers = indices_of(dim_intervals(like, like_shape, dim, coordinate))
        return numbers[numbers < size]

    axes = tuple(sorted(a for a in layout.shard_order[dim] if layout.mesh_shape[a] > 1))
    if not axes:
        mine = wanted(layout.info.my_coordinate())
        return lambda x: x.index_select(dim, mine.to(x.device))
    group = layout.info.group(axes)
    held = [indices_of(dim_intervals(layout, shape, dim, c)) for c in group.coordinates]
    move = Move(group, held, [wanted(c) for c in group.coordinates])
    return lambda x: move(x, dim)
