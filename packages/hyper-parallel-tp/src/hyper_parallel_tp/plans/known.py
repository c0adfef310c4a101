"""The plan of a model that has one: a recipe or a plan of an installed plugin, or the one that it carries."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hyper_parallel import DeviceMesh
from hyper_parallel.plugins import default_manager
from hyper_parallel_tp.parallel_dims import ParallelDims
from hyper_parallel_tp.plans.completion import completed_plan
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["GenericPlan", "Recipe", "generic_plan", "known_plan", "recipe_of"]


@dataclass(frozen=True)
class Recipe:
    """A function from a model's configuration and the degrees of parallelism to its plan.

    Attributes:
        source: where it is, ``module:function``.
        function: takes config and dims, and by keyword ``sequence_parallel`` and ``loss_parallel``.
    """

    source: str
    function: Callable[..., Mapping[str, ParallelStyle]]


@dataclass(frozen=True)
class GenericPlan:
    """A plan for a model without recipe.

    Attributes:
        source: where it is from, in words.
        styles: names of modules to styles.
        reasons: for modules or parameters that stay whole, why.
    """

    source: str
    styles: Mapping[str, ParallelStyle]
    reasons: Mapping[str, str] = field(default_factory=dict)


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe that an installed plugin has for models of exactly this class (hook ``hyper_parallel_model_plans``).

    Raises:
        PluginError: two plugins have one.
        ImportError: the plugin names a function that is not there.
    """
    kind = type(model)
    source = default_manager().model_plan(f"{kind.__module__}.{kind.__qualname__}")
    if source is None:
        return None
    module_name, _, name = source.partition(":")
    function = getattr(importlib.import_module(module_name), name, None)
    if function is None:
        raise ImportError(f"the plan of {kind.__qualname__} is said to be {source}, which is not there")
    return Recipe(source, function)


def generic_plan(model: nn.Module, dims: ParallelDims) -> GenericPlan | None:
    """The plan that a model of ``transformers`` carries, completed; None when it carries none and nothing is known of
    its layers (:mod:`hyper_parallel_tp.plans.completion`)."""
    found = completed_plan(model, dims.tp)
    return None if found is None else GenericPlan(*found)


def known_plan(model: nn.Module, mesh: DeviceMesh) -> Any:
    """The plan that :func:`parallelize_module` uses when it is given none; None when nobody knows one.

    Recipes are asked first, in their plain form: the sequence is whole, and so are the logits. Then plugins
    (hook ``hyper_parallel_sharding_plan``), then the model itself.
    """
    dims = ParallelDims(tp=mesh.size(), dp_shard=1, world_size=mesh.size())
    recipe = recipe_of(model)
    if recipe is not None:
        return recipe.function(getattr(model, "config", None), dims, sequence_parallel=False, loss_parallel=False)
    given = default_manager().first_result("hyper_parallel_sharding_plan", model=model, mesh=mesh)
    if given is None:
        found = generic_plan(model, dims)
        given = None if found is None else found.styles
    return given
