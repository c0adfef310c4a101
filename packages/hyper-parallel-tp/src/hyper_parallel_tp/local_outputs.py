"""From a DTensor to this rank's piece, where a style hands out plain tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel import DTensor
from hyper_parallel.placements import is_shard


def local_piece(value: Any, module: nn.Module) -> Any:
    """This rank's piece of a DTensor, as a plain tensor; anything else as it is.

    Pieces of different length are handed out only along the last dim: there the next layer knows the whole length. A
    plain piece of a sequence says nothing about the others, and ranks that guess differently would hang.

    Raises:
        ValueError: another dim is unevenly sharded.
    """
    if not isinstance(value, DTensor):
        return value
    for axis, placement in enumerate(value.placements):
        if is_shard(placement) and placement.dim != value.ndim - 1:
            length, ways = value.shape[placement.dim], value.layout.mesh_shape[axis]
            if length % ways:
                raise ValueError(
                    f"{type(module).__name__}: dim {placement.dim} of its output has length {length}, which {ways} "
                    "ranks do not divide, so plain pieces of it would differ in length from rank to rank. Pad it (see "
                    "ParallelDims.seq_len_divisor), or keep DTensors with use_local_output=False"
                )
    return value.to_local()
