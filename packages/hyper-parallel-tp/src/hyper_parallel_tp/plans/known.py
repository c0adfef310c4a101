"""The plan of a model that comes with one: from an installed plugin, or from ``transformers``."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel import DeviceMesh
from hyper_parallel.plugins import default_manager
from hyper_parallel_tp.plans.transformers import transformers_plan

__all__ = ["known_plan"]


def known_plan(model: nn.Module, mesh: DeviceMesh) -> Any:
    """The plan that :func:`parallelize_module` uses when it is given none; None when nobody knows one.

    Plugins are asked first (hook ``hyper_parallel_sharding_plan``), then the model itself: its ``tp_plan``.
    """
    given = default_manager().first_result("hyper_parallel_sharding_plan", model=model, mesh=mesh)
    return transformers_plan(model) if given is None else given
