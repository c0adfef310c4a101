"""From a DTensor to this rank's piece, where a style hands out plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Layout
from hyper_parallel.rules import is_shard, local_of, mesh_info


def local_piece(value: Any, module: nn.Module, mesh: DeviceMesh) -> Any:
    """This rank's piece of a DTensor on the style's mesh, as a plain tensor; anything else as it is.

    A DTensor on a larger mesh, such as that of a batch laid out over data axes, stays one: of its plain piece nobody
    would know that it is a part of the batch.

    Raises:
        ValueError: the pieces do not tell where they belong, see :func:`check_pieces`.
    """
    if not isinstance(value, DTensor) or value.layout.info is not mesh_info(mesh):
        return value
    check_pieces(value.layout, value.shape, module)
    return local_of(value)


def check_pieces(layout: Layout, shape: Sequence[int], module: nn.Module) -> None:
    """Pieces of different length are handed out only along the last dim: there the next layer knows the whole length. A
    plain piece of a sequence says nothing about the others, and ranks that guess differently would hang.

    Raises:
        ValueError: another dim is unevenly sharded.
    """
    for axis, placement in enumerate(layout.placements):
        if is_shard(placement) and placement.dim != len(shape) - 1:
            length, ways = shape[placement.dim], layout.mesh_shape[axis]
            if length % ways:
                raise ValueError(
                    f"{type(module).__name__}: dim {placement.dim} of its output has length {length}, which {ways} "
                    "ranks do not divide, so plain pieces of it would differ in length from rank to rank. Pad it (see "
                    "ParallelDims.seq_len_divisor), or keep DTensors with use_local_output=False"
                )
