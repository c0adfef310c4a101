"""How the parameters, inputs and outputs of a module are laid out, as a value that plugins can give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ShardingPlan"]


@dataclass
class ShardingPlan:
    """How a module is laid out. A layout is a :class:`Layout` or placements, one per mesh axis.

    Names are dotted paths; ``*`` stands for one path component or a part of one (``?`` and ``[0-9]`` for a character),
    ``**`` for any number of them.

    Attributes:
        plan: parameter name -> layout, e.g. ``{"layers.*.mlp.up_proj.weight": [Shard(0)]}``.
        input_plan: ``"<module>.input"`` (or the module's name, ``""`` for the root) -> layouts of its inputs: a
            tuple, one per positional argument (None: leave as it is), or a mapping from argument names. DTensors are
            redistributed; a plain tensor is taken as this rank's piece in that layout.
        output_plan: ``"<module>.output"`` -> layout of the output, or a tuple for several.
        return_local_tensor: modules (names, globs) whose outputs become plain local tensors, pending reductions carried
            out; True for the root.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    input_plan: Mapping[str, Any] = field(default_factory=dict)
    output_plan: Mapping[str, Any] = field(default_factory=dict)
    return_local_tensor: bool | Iterable[str] = ()
