"""The plan of Qwen3-Next: delta layers and gated attention, experts with a shared one."""

from __future__ import annotations

from typing import Any

from hyper_parallel import ParallelDims, ParallelStyle, Shard, gated_mlp
from hyper_parallel_ops_qwen.plans.decoder_parts import (
    attention,
    delta_layers,
    has_experts,
    layers,
    mixture,
    outside_of_layers,
    residual_of,
)

__all__ = ["qwen3_next_plan"]

_BY_HEADS = {"in_proj_qkvz.weight": Shard(0), "in_proj_ba.weight": Shard(0)}
"""What belongs to one key head is together: its query, key, values and gates."""


def qwen3_next_plan(
    config: Any, dims: ParallelDims, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3NextForCausalLM``; arguments as of :func:`.qwen3_moe_plan`."""
    residual = residual_of(sequence_parallel)
    plan = outside_of_layers(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    for layer in layers(config, lambda number: config.layer_types[number] == "full_attention"):
        plan |= attention(layer, residual)
    for layer in layers(config, lambda number: config.layer_types[number] == "linear_attention"):
        plan |= delta_layers(layer, config, dims, residual, _BY_HEADS)

    for layer in layers(config, lambda number: has_experts(config, number)):
        plan |= mixture(f"{layer}.mlp", config, residual, shared=True)
    for layer in layers(config, lambda number: not has_experts(config, number)):
        plan |= gated_mlp(f"{layer}.mlp", residual, input=residual)
    return plan
