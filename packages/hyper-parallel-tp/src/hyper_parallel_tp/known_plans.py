"""The plan of a model that comes with one: from an installed plugin, or from ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hyper_parallel import DeviceMesh
from hyper_parallel.plugins import default_manager

__all__ = ["known_plan"]


def known_plan(model: nn.Module, mesh: DeviceMesh) -> Mapping[str, Any] | Any | None:
    """The plan that :func:`parallelize_module` uses when it is given none; None when nobody knows one."""
    return default_manager().first_result("hyper_parallel_sharding_plan", model=model, mesh=mesh)
