"""How long a collective waits for a rank that has stopped: as long as the user said to ``init_process_group``.

torch gives every other group its own default (half an hour), those of a ``DeviceMesh`` too, which asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["give_users_limit", "users_limit"]


def users_limit() -> timedelta | None:
    """The time limit of the default group; None for a backend that has none."""
    return next((limit for _, limit in _limits(dist.group.WORLD)), None)


def give_users_limit(mesh: DeviceMesh) -> None:
    """Give the groups over the axes of a mesh the time limit of the default group, where torch has given its own. One
    that the user has made with another limit keeps that."""
    limit = users_limit()
    if limit is None or mesh.get_coordinate() is None:
        return
    defaults = _torch_defaults()
    for axis in range(mesh.ndim):
        for backend, found in _limits(mesh.get_group(axis)):
            if found in defaults and found != limit:
                backend._set_default_timeout(limit)


def _torch_defaults() -> tuple[timedelta, ...]:
    named = (getattr(dist.distributed_c10d, f"default_pg_{kind}timeout", None) for kind in ("", "nccl_"))
    return tuple(limit for limit in named if limit is not None)


def _limits(group: Any) -> Iterator[tuple[Any, timedelta]]:
    """The backends of a group that have a time limit, each with it."""
    for device in group._device_types:
        backend = group._get_backend(device)
        limit = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(limit, timedelta):
            yield backend, limit
