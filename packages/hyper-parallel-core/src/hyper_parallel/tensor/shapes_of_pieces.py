"""The global shapes of tensors of which every rank knows its own piece only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hyper_parallel.comm import primitives as comm
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import AxisGroup, MeshInfo
from hyper_parallel.sharding.placements import PackedShard
from hyper_parallel.sharding.shard_ranges import local_shape

__all__ = ["global_shapes"]

Shape = tuple[int, ...]


def global_shapes(pieces: Sequence[tuple[Sequence[int], Layout]], what: str) -> list[Shape]:
    """The global shapes of tensors, given the shape of this rank's piece of each and its layout.

    One all-gather of all sizes for each mesh on which one is sharded: what a function makes of its piece of the input
    may have any size, and another one at each call. Where none is sharded nothing is communicated.

    Args:
        what: whose results they are, for the error.

    Raises:
        ValueError: on every rank, when the pieces are not those of one tensor as its layout cuts it (as
            ``torch.chunk`` does).
    """
    found: list[Shape] = [tuple(shape) for shape, _ in pieces]
    meshes = dict.fromkeys(layout.info for _, layout in pieces if any(layout.shard_order))
    for info in meshes:
        here = [i for i, (_, layout) in enumerate(pieces) if layout.info is info and any(layout.shard_order)]
        everyone = info.group(tuple(range(info.ndim)))
        if everyone.size == 1:
            continue
        said = _said_by_all([found[i] for i in here], info, everyone)
        whole = [_joined(pieces[i][1], [of[k] for of in said], everyone) for k, i in enumerate(here)]
        for k, i in enumerate(here):
            _check(what, i, whole[k], pieces[i][1], [of[k] for of in said], everyone)
            found[i] = whole[k]
    return found


def _said_by_all(mine: Sequence[Shape], info: MeshInfo, everyone: AxisGroup) -> list[list[Shape]]:
    """For each member the shapes of its pieces."""
    sizes = torch.tensor([*itertools.chain(*mine)], dtype=torch.int64, device=info.default_device())
    out = sizes.new_empty(everyone.size * len(sizes))
    comm.all_gather(out, sizes, everyone)
    ends = [*itertools.accumulate(len(shape) for shape in mine)]
    rows = out.view(everyone.size, -1).tolist()
    return [[tuple(row[end - len(s) : end]) for end, s in zip(ends, mine, strict=True)] for row in rows]


def _joined(layout: Layout, said: Sequence[Shape], everyone: AxisGroup) -> Shape:
    """The global shape that the pieces along this rank's lines through the mesh add up to."""
    here = layout.info.my_coordinate()
    shape = list(said[everyone.rank])
    for dim, axes in enumerate(layout.shard_order):
        packed = [p for a in axes if isinstance(p := layout.placements[a], PackedShard)]
        if packed:
            shape[dim] = sum(packed[0].sections)
        elif axes:
            others = [a for a in range(len(here)) if a not in axes]
            shape[dim] = sum(
                of[dim]
                for of, c in zip(said, everyone.coordinates, strict=True)
                if all(c[a] == here[a] for a in others)
            )
    return tuple(shape)


def _check(what: str, index: int, shape: Shape, layout: Layout, said: Sequence[Shape], everyone: AxisGroup) -> None:
    wanted = [local_shape(layout, shape, coordinate) for coordinate in everyone.coordinates]
    if list(said) == wanted:
        return
    rows = [
        f"rank at {coordinate}: {of}, wanted {piece}"
        for coordinate, of, piece in zip(everyone.coordinates, said, wanted, strict=True)
    ]
    raise ValueError(
        "\n  ".join(
            [
                f"{what}: the pieces of output {index} are not those of one tensor of shape {shape} with {layout}",
                *rows,
                "fix: return pieces as torch.chunk cuts them; or let the function return plain tensors, and lay them "
                "out yourself",
            ]
        )
    )
