"""The layouts in which the tensor arguments of a sample are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.sharding.placements import Placement, short

Placements = tuple[tuple[Placement, ...], ...]
"""Per tensor argument one placement per mesh axis."""


def one_axis(tensors: Sequence[torch.Tensor]) -> Iterator[Placements]:
    """One argument is a pending sum, or one dim of it is sharded; where others have that dim too, also that of all."""
    most = max(t.ndim for t in tensors)
    for place, tensor in enumerate(tensors):
        for dim in range(tensor.ndim):
            yield _alone(tensors, place, (Shard(dim),))
        # Labels and zeros are compared exactly, which no sum of random terms stands up to.
        if tensor.is_floating_point() and not (tensor == tensor.round()).any():
            yield _alone(tensors, place, (Partial(),))
    for dim in range(most if len(tensors) > 1 else 0):
        together = tuple((Shard(dim),) if dim < t.ndim else (Replicate(),) for t in tensors)
        if sum(isinstance(p, Shard) for (p,) in together) > 1:
            yield together


def two_axes(tensors: Sequence[torch.Tensor]) -> Iterator[Placements]:
    """Both axes shard one dim of one argument, or two neighbouring dims."""
    for place, tensor in enumerate(tensors):
        for dim in range(tensor.ndim):
            yield _alone(tensors, place, (Shard(dim), Shard(dim)))
            if tensor.ndim > 1:
                yield _alone(tensors, place, (Shard(dim), Shard((dim + 1) % tensor.ndim)))


def _alone(tensors: Sequence[torch.Tensor], place: int, placements: tuple[Placement, ...]) -> Placements:
    whole = (Replicate(),) * len(placements)
    return tuple(placements if i == place else whole for i in range(len(tensors)))


def shown(placements: Placements) -> str:
    """``S(0) R`` for two arguments on one axis, ``S(0),S(1) R,R`` on two."""
    return " ".join(",".join(map(short, argument)) for argument in placements)
