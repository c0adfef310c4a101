"""Apply the redistributions that a plan asks for to the arguments of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.dispatch.arguments import first_dtensor, map_arguments, replica_spec
from hyper_parallel.dispatch.plan import Plan
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.tensor.in_place import vary_in_place
from hyper_parallel.tensor.redistribute_cache import reduced_form, remembered
from hyper_parallel.utils.structures import map_tensors


def _replica(tensor: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
    return wrap(tensor, replica_spec(tensor, first_dtensor(args, kwargs).layout))


def changed(args: Sequence[Any], kwargs: dict[str, Any], plan: Plan, inplace: bool) -> tuple[Any, Any]:
    """The arguments with the plan's redistributions applied, to the inputs by their number."""
    changes = {index: (layout, varying) for index, layout, varying in plan.changes or ()}
    counter = iter(range(1 << 30))

    def change(tensor: torch.Tensor) -> Any:
        index = next(counter)
        found = changes.get(index)
        if found is None:
            return tensor
        if inplace and index == 0:
            return vary_in_place(tensor, found[1])  # type: ignore[arg-type]
        return remembered(tensor if isinstance(tensor, DTensor) else _replica(tensor, args, kwargs), *found)

    return tuple(map_tensors(a, change) for a in args), {
        name: map_tensors(value, change) for name, value in kwargs.items()
    }


def changed_at_places(
    plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """As :func:`changed` where the plan knows which arguments the inputs are; their local forms change too."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for place, (_, layout, varying) in zip(plan.places or (), plan.changes or (), strict=True):
        given: Any = new_kwargs if place.__class__ is str else new_args
        local: Any = local_kwargs if place.__class__ is str else local_args
        tensor = given[place]
        form = remembered(tensor if isinstance(tensor, DTensor) else _replica(tensor, args, kwargs), layout, varying)
        given[place] = form
        local[place] = form._local if form._pending is None else form._resolve()
    return new_args, new_kwargs


def with_reduced_forms(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The arguments with every pending sum that was carried out once in that form, so that no second reduction follows;
    None when there is none."""
    found = []

    def reduced(tensor: DTensor) -> DTensor:
        form = reduced_form(tensor)
        if form is not tensor:
            found.append(form)
        return form

    new = map_arguments(args, kwargs, reduced)
    return new if found else None
