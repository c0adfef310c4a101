"""Which plan a model gets: the one it is given, a recipe of an installed plugin, or the one that it carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hyper_parallel_tp.parallel_dims import ParallelDims
from hyper_parallel_tp.plans.known import generic_plan, recipe_of
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["ChosenPlan", "choose_plan"]


@dataclass(frozen=True)
class ChosenPlan:
    """What :func:`parallelize` applies.

    Attributes:
        source: where it is from, for the report.
        styles: names of modules to styles.
        sequence_parallel, loss_parallel: whether the styles do so; None: a user's plan, which says it by itself.
        reasons: for modules or parameters that stay whole, why.
    """

    source: str
    styles: Mapping[str, ParallelStyle]
    sequence_parallel: bool | None
    loss_parallel: bool | None
    reasons: Mapping[str, str] = field(default_factory=dict)


def choose_plan(
    model: nn.Module,
    dims: ParallelDims,
    given: Mapping[str, ParallelStyle] | None,
    sequence_parallel: bool | None,
    loss_parallel: bool | None,
) -> ChosenPlan:
    """The plan for a model.

    Raises:
        ValueError: True for something that the plan does not do, or that there is no axis for.
        TypeError: the given plan has something else than styles.
    """
    asked = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    for name, value in asked.items():
        if value and dims.tp == 1:
            raise ValueError(f"parallelize: {name}=True needs a tp axis of several ranks, and tp is 1")
    if given is not None:
        _check_given(given, asked)
        return ChosenPlan("the plan that was given", given, None, None)
    recipe = recipe_of(model)
    if recipe is not None:
        wanted = {name: dims.tp > 1 if value is None else value for name, value in asked.items()}
        styles = recipe.function(_config_of(model), dims, **wanted)
        return ChosenPlan(recipe.source, styles, wanted["sequence_parallel"], wanted["loss_parallel"])
    if dims.tp == dims.ep == 1:
        return ChosenPlan("none is needed", {}, False, False)
    for name, value in asked.items():
        if value:
            raise ValueError(
                f"parallelize: {name}=True, and no recipe that does so is known for {type(model).__name__}; give a "
                "plan, or leave it None"
            )
    found = generic_plan(model, dims)
    if found is None:
        raise ValueError(
            f"parallelize: no plan is known for {type(model).__name__}, and its layers are not recognised; pass "
            "plan={name of a module: style, ...}"
        )
    return ChosenPlan(found.source, found.styles, False, False, found.reasons)


def _config_of(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def _check_given(plan: Mapping[str, ParallelStyle], asked: Mapping[str, bool | None]) -> None:
    if not isinstance(plan, Mapping) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        raise TypeError("parallelize: plan maps names of modules to styles, such as {'lm_head': ColwiseParallel()}")
    said = [name for name, value in asked.items() if value is not None]
    if said:
        raise ValueError(f"parallelize: with a plan of your own, its styles say {' and '.join(said)}; leave it None")
