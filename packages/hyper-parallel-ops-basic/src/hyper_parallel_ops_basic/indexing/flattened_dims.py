"""Neighbouring dims of a tensor as planes, whose places have numbers: counted row by row."""

from __future__ import annotations

import torch

from hyper_parallel import Layout
from hyper_parallel.rules import dim_intervals, indices_of

__all__ = ["held_places"]


def held_places(layout: Layout, shape: tuple[int, ...], first: int, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The places that a rank holds of every plane.

    Args:
        layout: of the tensor.
        shape: its global shape up to the last dim of the planes.
        first: dim of the planes.
        coordinate: the rank's.
    """
    places = torch.zeros(1, dtype=torch.int64)
    for d in range(first, len(shape)):
        along = indices_of(dim_intervals(layout, shape, d, coordinate))
        places = (places.unsqueeze(1) * shape[d] + along).flatten()
    return places
