"""A world of many ranks in one process: this process is rank 0, and collectives return at once without moving data.

Shapes, layouts and the collectives that would run are right; values are not. It stands on PyTorch's ``fake`` backend.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hyper_parallel.mesh import DeviceMesh, init_device_mesh

__all__ = ["fake_world", "parse_mesh"]


def parse_mesh(text: str) -> dict[str, int]:
    """``"dp=2,tp=4"`` as axis names and sizes.

    Raises:
        ValueError: for anything else.
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not (name.isidentifier() and equals and size.isdigit() and int(size) > 0) or name in mesh:
            raise ValueError(f"a mesh is written as dp=2,tp=4 (different names, sizes from 1); got {text!r}")
        mesh[name] = int(size)
    return mesh


@contextmanager
def fake_world(size: int | Mapping[str, int]) -> Iterator[None]:
    """Inside, ``torch.distributed`` is initialised with so many ranks, and a program that initialises it keeps this.

    ``init_process_group`` and ``destroy_process_group`` do nothing inside, nor do saving and loading a distributed
    checkpoint, which need the other ranks' shards; the environment variables of a launcher (``RANK``, ``WORLD_SIZE``
    and so on) say that this is rank 0. So a script for ``torchrun`` runs as it is.

    Args:
        size: number of ranks, or the axes of a mesh with as many.

    Raises:
        RuntimeError: when a process group exists already.
    """
    ranks = size if isinstance(size, int) else math.prod(size.values())
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; a fake world needs a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    before = {name: os.environ.get(name) for name in variables}
    skipped = [(home, name, getattr(home, name)) for home, name in _skipped()]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    os.environ.update(variables)
    try:
        for home, name, _ in skipped:
            setattr(home, name, _nothing)
        yield
    finally:
        for home, name, function in skipped:
            setattr(home, name, function)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        dist.destroy_process_group()


def _skipped() -> list[tuple[Any, str]]:
    """Where the functions are that cannot work with one rank of many."""
    import torch.distributed.checkpoint as checkpoint

    groups = ("init_process_group", "destroy_process_group")
    found: list[tuple[Any, str]] = [(home, name) for home in (dist, dist.distributed_c10d) for name in groups]
    return found + [(checkpoint, name) for name in ("save", "async_save", "load")]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for such a function."""


def fake_mesh(axes: Mapping[str, int]) -> DeviceMesh:
    """A mesh over the whole fake world."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
