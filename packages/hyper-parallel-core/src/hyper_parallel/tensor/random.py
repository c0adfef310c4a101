"""Random numbers that do not depend on the layout.

Every operator that draws numbers gives each element the value that one device with the same seed would give it, for any
layout, and leaves the generator in the state in which one device would leave it. So Replicate ranks agree, Shard ranks
differ, and a run on more ranks repeats the run on one. The state lives in PyTorch's own generators, where
``torch.utils.checkpoint`` saves and restores it.

How: every rank draws the numbers of the *whole* tensor and keeps its part. The cost is memory and time for one global
tensor of the drawn shape, for the moment of the draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hyper_parallel.comm import primitives as comm
from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.comm.steps import put
from hyper_parallel.sharding.shard_ranges import box
from hyper_parallel.sharding.spec import contiguous_stride

if TYPE_CHECKING:
    from hyper_parallel.sharding.layout import Layout
    from hyper_parallel.sharding.mesh import MeshInfo

__all__ = ["check_generators", "draw", "embedded", "local_part", "manual_seed"]

_checked: WeakKeyDictionary[MeshInfo, bool] = WeakKeyDictionary()


def manual_seed(seed: int) -> None:
    """Seed PyTorch's generators of all devices; call it with the same number on every rank.

    Unlike with plain PyTorch, ranks must *not* get different seeds: what differs between them follows from the layout.
    """
    torch.manual_seed(seed)
    _checked.clear()


def check_generators(info: MeshInfo, generator: torch.Generator | None = None) -> None:
    """Once per mesh, compare the generators of its ranks. Collective over the mesh.

    Args:
        info: the mesh.
        generator: the user's own generator; it is not compared.

    Raises:
        RuntimeError: on every rank, when the states differ.
    """
    if generator is not None or _checked.get(info):
        return
    device = info.default_device()
    digest = _digest(_state(device))
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    comm.all_reduce(extremes, info.group(tuple(range(info.ndim))), "max")
    high, low = extremes.tolist()
    if high != -low:
        raise RuntimeError(
            f"the random generators of the ranks of mesh {info!r} differ, so Replicate tensors would get different "
            "numbers on different ranks. Call hyper_parallel.manual_seed(seed) with the same seed on every rank"
        )
    _checked[info] = True


def _state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device)


def _digest(state: torch.Tensor) -> int:
    """A number of 62 bits that tells states apart."""
    return int.from_bytes(hashlib.blake2b(bytes(state.tolist()), digest_size=8).digest(), "big") >> 2


def draw(
    layout: Layout, shape: tuple[int, ...], make: Callable[[], torch.Tensor], generator: Any = None
) -> torch.Tensor:
    """This rank's part of the global tensor of ``shape`` that ``make`` draws."""
    check_generators(layout.info, generator)
    with torch.no_grad():
        return local_part(make(), layout, shape)


def local_part(whole: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """What a rank holds of a global tensor that it has in full."""
    return plan_transition(layout.replicated(), layout, shape).run(whole)


def embedded(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...], fill: float, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A global tensor with this rank's part in its place and ``fill`` elsewhere.

    For draws that read a tensor (``bernoulli(p)``): each element's number depends on its own parameter only, so the
    others' may be anything. Some kernels draw in the order of the elements in memory, which ``stride`` tells.
    """
    if tuple(local.shape) == shape:
        return local.detach()
    whole = local.new_empty_strided(shape, stride or contiguous_stride(shape)).fill_(fill)
    held = box(layout, shape, layout.info.my_coordinate())
    put(whole, tuple(tuple((start, stop - start) for start, stop in intervals) for intervals in held), local.detach())
    return whole
