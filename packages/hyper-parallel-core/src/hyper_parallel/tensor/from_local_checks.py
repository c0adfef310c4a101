"""What is found out of the ranks' pieces: the global shape, and whether they fit together."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.comm import primitives as comm
from hyper_parallel.comm.redistribute import describe, transition
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import MeshInfo
from hyper_parallel.sharding.placements import PackedShard, Partial, Replicate, Shard
from hyper_parallel.sharding.spec import NOT_VARYING

__all__ = ["check_is_plain", "check_ranks_agree", "check_replicas_agree", "check_same", "global_shape"]


def check_is_plain(local: Any) -> None:
    """Raise TypeError for what is no tensor, and for a DTensor, ours or PyTorch's."""
    kind = type(local)
    if not isinstance(local, torch.Tensor) or kind.__name__ == "DTensor":
        hint = "; DTensor.from_torch takes over one of PyTorch's" if kind.__module__.startswith("torch.") else ""
        raise TypeError(f"from_local takes this rank's plain tensor, got {kind.__module__}.{kind.__name__}{hint}")


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


def check_same(info: MeshInfo, what: str, mine: str, *, traced: bool = True) -> None:
    """Raise ValueError on every rank when the ranks of a mesh say different things of ``what``.

    One all-reduce of 16 bytes, of the same size whatever is said; only where they differ the texts are gathered.

    Args:
        info: the mesh.
        what: of what they say it, for the error.
        mine: what this rank says.
        traced: whether a CommTrace counts the all-reduce.
    """
    everyone = info.group(tuple(range(info.ndim)))
    if everyone.size == 1:
        return
    code = zlib.crc32(mine.encode())
    extremes = torch.tensor([code, -code], device=info.default_device())
    if traced:
        comm.all_reduce(extremes, everyone, "max")
    else:
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=everyone.group)
    highest, lowest = extremes.tolist()
    if highest == -lowest:
        return
    said: list[Any] = [None] * everyone.size
    dist.all_gather_object(said, mine, group=everyone.group)
    ranks = zip(everyone.coordinates, said, strict=True)
    raise ValueError("\n  ".join([f"{what} differs by rank:", *(f"rank at {here}: {text}" for here, text in ranks)]))


def check_ranks_agree(fits: bool, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError on every rank when the ranks give different dtypes or global shapes, or one of them holds a
    wrong piece."""
    check_same(layout.info, "from_local: the local tensor", f"{dtype}, {len(shape)} dimensions")
    info = layout.info
    everyone = info.group(tuple(range(info.ndim)))
    extremes = torch.tensor([int(not fits), *shape, *(-s for s in shape)], device=info.default_device())
    comm.all_reduce(extremes, everyone, "max")
    wrong, *sizes = extremes.tolist()
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
