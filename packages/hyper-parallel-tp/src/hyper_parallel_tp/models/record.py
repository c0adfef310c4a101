"""What :func:`parallelize` did to a model, kept for its report, and the checks of what stays whole."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from hyper_parallel import DTensor
from hyper_parallel.rules import is_replicate, local_shape
from hyper_parallel_tp.models.chosen_plan import ChosenPlan
from hyper_parallel_tp.parallel_dims import ParallelDims

__all__ = [
    "AXIS_OF_DEGREE",
    "Held",
    "Parallelized",
    "check_what_is_whole",
    "held_by",
    "note_parallelized",
    "record_of",
    "whole_over",
]

MOST_WHOLE = 0.1
"""The share of its parameters that an axis may leave whole without a warning."""

AXIS_OF_DEGREE = {"tp": "tp", "dp_shard": "fsdp"}
"""Degrees that are there to shard parameters, and the mesh axis that does so."""

_records: weakref.WeakKeyDictionary[nn.Module, Parallelized] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Parallelized:
    """What was asked for and chosen.

    Attributes:
        dims, checkpointing: as given.
        plan: what was chosen.
        blocks: the blocks of the model, by name.
    """

    dims: ParallelDims
    plan: ChosenPlan
    blocks: Mapping[str, nn.Module]
    checkpointing: str


def note_parallelized(model: nn.Module, base: nn.Module, record: Parallelized) -> None:
    """Remember it for the model, and for the one inside of its adapters."""
    _records[model] = _records[base] = record


def record_of(model: nn.Module) -> Parallelized:
    """What :func:`parallelize` did to a model.

    Raises:
        ValueError: nothing.
    """
    found = _records.get(model)
    if found is None:
        raise ValueError(f"this {type(model).__name__} was not given to parallelize or load_pretrained")
    return found


class Held(NamedTuple):
    """One parameter, as its ranks hold it.

    Attributes:
        name: in the model.
        nbytes: of the whole parameter.
        local: bytes of this rank's shard.
        axes: mesh axes that shard it.
    """

    name: str
    nbytes: int
    local: int
    axes: frozenset[str]


def held_by(model: nn.Module) -> list[Held]:
    """Every parameter of a model, tied ones once."""
    found = []
    for name, parameter in model.named_parameters():
        nbytes, local, axes = parameter.nbytes, parameter.nbytes, frozenset[str]()
        if isinstance(parameter, DTensor):
            names = parameter.layout.info.names
            axes = frozenset(n for n, p in zip(names, parameter.placements, strict=True) if not is_replicate(p))
            layout = parameter.layout
            local = math.prod(local_shape(layout, tuple(parameter.shape), layout.info.my_coordinate()))
            local *= parameter.element_size()
        found.append(Held(name, nbytes, local, axes))
    return found


def whole_over(held: Iterable[Held], axis: str) -> list[Held]:
    """Those that a mesh axis does not shard."""
    return [each for each in held if axis not in each.axes]


def check_what_is_whole(model: nn.Module, kind: str, record: Parallelized) -> None:
    """Judge what each axis shards of a model, whose class is called ``kind``.

    Raises:
        ValueError: an axis of several ranks that is there to shard parameters shards none.
    """
    held = held_by(model)
    for axis, name in AXIS_OF_DEGREE.items():
        degree = getattr(record.dims, axis)
        if degree == 1 or not held:
            continue
        whole = whole_over(held, name)
        total, left = sum(each.nbytes for each in held), sum(each.nbytes for each in whole)
        if left == total:
            raise ValueError(
                f"parallelize: {axis}={degree}, and {kind} has no parameter that {axis} shards; {_remedy(axis)}"
            )
        if left > MOST_WHOLE * total:
            largest = ", ".join(each.name for each in sorted(whole, key=lambda each: -each.nbytes)[:3])
            warnings.warn(
                f"parallelize: {left / total:.0%} of the parameters' bytes are whole on every rank of {axis}: "
                f"{largest} …; parallel_report(model) lists them",
                stacklevel=3,
            )


def _remedy(axis: str) -> str:
    if axis == "dp_shard":
        return "use dp_replicate for copies of the model"
    return f"use {axis}=1, or pass a plan with styles for it"
