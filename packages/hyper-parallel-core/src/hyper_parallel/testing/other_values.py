"""The same tensors with other values, for finding what a rule kept of an earlier call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial
from hyper_parallel.tensor.dtensor import DTensor


def halve_in_place(leaves: Sequence[DTensor]) -> None:
    """Halve the values of DTensors of floating dtype, on this rank's pieces; a pending product has no half."""
    with torch.no_grad():
        for leaf in leaves:
            if _can_be_halved(leaf._local, leaf.layout):
                leaf._local.mul_(0.5)


def halved(values: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """The global values of DTensors of these layouts after :func:`halve_in_place`."""
    return [v * 0.5 if _can_be_halved(v, x) else v for v, x in zip(values, layouts, strict=True)]


def _can_be_halved(value: torch.Tensor, layout: Layout) -> bool:
    return value.dtype.is_floating_point and Partial("product") not in layout.placements
