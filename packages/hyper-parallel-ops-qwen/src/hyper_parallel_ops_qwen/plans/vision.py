"""What looks at pictures in Qwen's models: attention by heads, MLPs by features; and its way into the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel import (
    ColwiseParallel,
    MaskedAddition,
    NoParallel,
    ParallelDims,
    ParallelStyle,
    RowwiseParallel,
)

__all__ = ["seeing", "with_pictures"]


def seeing(
    config: Any, dims: ParallelDims, name: str = "model.visual", *, adds_in_layers: bool = False
) -> dict[str, ParallelStyle]:
    """The styles of a vision tower: blocks by heads and features, mergers by features, the patch embedding whole.

    Patches are whole on every rank. Queries, keys and values come from one projection, each by its heads. Where tp does
    not divide the heads, attention is whole.

    Args:
        config: of the tower (``vision_config``).
        dims: degrees of parallelism.
        name: where the tower is in its model.
        adds_in_layers: whether it has mergers for what is added after the first layers of the language model.
    """
    width = config.hidden_size
    into, out_of = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    plan: dict[str, ParallelStyle] = {}
    if config.num_heads % dims.tp == 0:
        plan[f"{name}.blocks.*.attn.qkv"] = ColwiseParallel(sections=(width, width, width), use_local_output=False)
        plan[f"{name}.blocks.*.attn.proj"] = out_of
    mergers = [f"{name}.merger"]
    if adds_in_layers:
        mergers.append(f"{name}.deepstack_merger_list.*")
    for mlp in (f"{name}.blocks.*.mlp", *mergers):
        plan[f"{mlp}.linear_fc1"] = into
        plan[f"{mlp}.linear_fc2"] = out_of
    plan[name] = NoParallel(use_local_output=False)
    return plan


def with_pictures(
    text: Mapping[str, ParallelStyle], config: Any, dims: ParallelDims, *, adds_in_layers: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of a model that also looks at pictures.

    Args:
        text: the plan of the model for text only, with its names (``model.layers.*`` …).
        config: of the whole model.
        dims: degrees of parallelism.
        adds_in_layers: whether what the tower saw is added after the first layers, too (``_deepstack_process``).
    """
    inside = {name: style for name, style in text.items() if name.partition(".")[0] == "model"}
    outside = {name: style for name, style in text.items() if name not in inside}
    plan = {f"model.language_{name}": style for name, style in inside.items()}
    if adds_in_layers:
        plan["model"] = MaskedAddition("language_model._deepstack_process")
    return {**plan, **seeing(config.vision_config, dims, adds_in_layers=adds_in_layers), **outside}
