"""What ``DTensor.from_local`` finds out of the ranks' pieces: the global shape, and whether they fit together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyper_parallel import comm
from hyper_parallel.layout import Layout
from hyper_parallel.placements import PackedShard, Partial, Replicate, Shard
from hyper_parallel.redistribute import describe, transition
from hyper_parallel.spec import NOT_VARYING

__all__ = ["check_ranks_agree", "check_replicas_agree", "global_shape"]


def global_shape(
    local: torch.Tensor, layout: Layout, shape: Sequence[int] | None, stride: Sequence[int] | None
) -> tuple[int, ...]:
    """The global shape that ``from_local`` was given, or that follows when every rank holds as much."""
    for name, given in (("shape", shape), ("stride", stride)):
        if given is not None and len(given) != local.ndim:
            raise ValueError(f"from_local: {name}={tuple(given)} for a local tensor of {local.ndim} dimensions")
    if shape is not None:
        return tuple(shape)
    if stride is not None:
        raise ValueError("from_local: stride needs shape too")
    found = list(local.shape)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            found[placement.dim] *= layout.mesh_shape[axis]
    for placement in layout.placements:
        if isinstance(placement, PackedShard):
            found[placement.dim] = sum(placement.sections)
    return tuple(found)


_DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)


def check_ranks_agree(fits: bool, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError on every rank when the ranks give different dtypes or global shapes, or one of them holds a
    wrong piece."""
    info = layout.info
    everyone = info.group(tuple(range(info.ndim)))
    kind = _DTYPES.index(dtype)
    extremes = torch.tensor([int(not fits), kind, -kind, *shape, *(-s for s in shape)], device=info.default_device())
    comm.all_reduce(extremes, everyone, "max")
    wrong, last, first, *sizes = extremes.tolist()
    if last != -first:
        raise ValueError(f"from_local: the ranks hold different dtypes, among them {_DTYPES[-first]}, {_DTYPES[last]}")
    high, low = sizes[: len(shape)], [-s for s in sizes[len(shape) :]]
    if low != high:
        raise ValueError(f"from_local: the ranks disagree on the global shape: between {low} and {high}; pass shape=")
    if wrong and fits:
        raise ValueError(
            f"from_local: another rank's local shape does not fit global shape {shape} with {describe(layout)}"
        )


def check_replicas_agree(local: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
    """Raise ValueError on every rank when ranks hold different values where the layout says Replicate."""
    info = layout.info
    local = local.detach()
    copies = {a: Partial() for a, p in enumerate(layout.placements) if isinstance(p, Replicate)}
    # As numbers that add up without rounding, NaN included: the first copy and zeros elsewhere sum to the first copy.
    bits = local.contiguous().view(torch.uint8) if local.ndim else local.reshape(1).view(torch.uint8)
    flat = Layout.from_placements(layout.mesh, [Replicate()] * info.ndim, ndim=bits.ndim)
    terms = (flat.with_placements(copies), NOT_VARYING)
    size = tuple(bits.shape)
    first = transition(transition(bits, (flat, NOT_VARYING), terms, size), terms, (flat, NOT_VARYING), size)
    differs = torch.tensor(int(not torch.equal(first, bits)), device=info.default_device())
    comm.all_reduce(differs, info.group(tuple(range(info.ndim))), "max")
    if int(differs):
        raise ValueError(f"from_local: the ranks hold different values where {describe(layout)} says Replicate")
