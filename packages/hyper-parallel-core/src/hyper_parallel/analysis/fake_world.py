"""A world of many ranks in one process: this process is rank 0, and collectives return at once without moving data.

Shapes, layouts and the collectives that would run are right; values are not. It stands on PyTorch's ``fake`` backend.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel import torch_compat
from hyper_parallel.sharding.mesh import DeviceMesh, init_device_mesh

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
    checkpoint (PyTorch's functions and ours), which need the other ranks' shards. This holds also for a module that has
    imported them by name, before or inside. Other files are written as ever, and ``get_backend()`` says ``"fake"`` to a
    program that would rather not. The environment variables of a launcher (``RANK``, ``WORLD_SIZE`` and so
    on) say that this is rank 0. So a script for ``torchrun`` runs as it is.

    Args:
        size: number of ranks, or the axes of a mesh with as many.

    Raises:
        RuntimeError: when a process group exists already.
    """
    ranks = size if isinstance(size, int) else math.prod(size.values())
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; a fake world needs a process of its own")

    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    before = {name: os.environ.get(name) for name in variables}
    stand_ins = _stand_ins()
    dist.init_process_group("fake", store=torch_compat.fake_store(), rank=0, world_size=ranks)
    os.environ.update(variables)
    try:
        _replace_everywhere(stand_ins)
        yield
    finally:
        _replace_everywhere({stand_in: function for function, stand_in in stand_ins.items()})
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        dist.destroy_process_group()


def _stand_ins() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What stands for each function that cannot work with one rank of many: it does nothing and returns its kind."""
    import torch.distributed.checkpoint as torch_checkpoint

    from hyper_parallel import checkpoint

    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    found[checkpoint.load_safetensors] = _skipping(checkpoint.load_safetensors, lambda: ([], []))
    for home in (torch_checkpoint, checkpoint):
        found[home.async_save] = _skipping(home.async_save, _done)
        found |= {function: _skipping(function) for function in (home.save, home.load)}
    found[dist.all_to_all_single] = _exchanging(dist.all_to_all_single)
    for function in (checkpoint.save_safetensors, dist.init_process_group, dist.destroy_process_group):
        found[function] = _skipping(function)
    return found


def _exchanging(function: Callable[..., Any]) -> Callable[..., Any]:
    """The ``fake`` backend refuses to receive where nothing is sent, and to send where nothing is received."""

    @functools.wraps(function)
    def exchanged(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not input.numel():
            input, input_split_sizes = output, output_split_sizes
        if not output.numel():
            output, output_split_sizes = input, input_split_sizes
        return function(output, input, output_split_sizes, input_split_sizes, *args, **kwargs)

    return exchanged


def _skipping(function: Callable[..., Any], result: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    @functools.wraps(function)
    def skipped(*args: Any, **kwargs: Any) -> Any:
        return result()

    return skipped


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _replace_everywhere(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Under every name that any module has for them: ``from … import save`` makes a name of its own."""
    by_id = {id(old): new for old, new in replacements.items()}  # not every value of a module can be hashed
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = object.__getattribute__(module, "__dict__")  # a lazy module would load for vars()
            names.update({name: by_id[id(value)] for name, value in list(names.items()) if id(value) in by_id})


def fake_mesh(axes: Mapping[str, int]) -> DeviceMesh:
    """A mesh over the whole fake world."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
