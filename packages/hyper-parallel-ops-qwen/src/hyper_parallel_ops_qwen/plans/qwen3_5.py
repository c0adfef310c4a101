"""The plans of Qwen3.5's language models: delta layers and gated attention, with one MLP or with experts."""

from __future__ import annotations

from typing import Any

from hyper_parallel import PackedShard, ParallelDims, ParallelStyle, Placement, Shard, gated_mlp
from hyper_parallel_ops_qwen.plans.decoder_parts import (
    attention,
    delta_layers,
    layers,
    mixture,
    outside_of_layers,
    packed,
    residual_of,
)

__all__ = ["qwen3_5_moe_plan", "qwen3_5_plan"]


def qwen3_5_plan(
    config: Any, dims: ParallelDims, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3_5ForCausalLM``; arguments as of :func:`.qwen3_moe_plan`."""
    residual = residual_of(sequence_parallel)
    plan = _without_mlps(config, dims, sequence_parallel, loss_parallel)
    return {**plan, **gated_mlp("model.layers.*.mlp", residual, input=residual)}


def qwen3_5_moe_plan(
    config: Any, dims: ParallelDims, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3_5MoeForCausalLM``; arguments as of :func:`.qwen3_moe_plan`."""
    plan = _without_mlps(config, dims, sequence_parallel, loss_parallel)
    return {**plan, **mixture("model.layers.*.mlp", config, residual_of(sequence_parallel), shared=True)}


def _without_mlps(
    config: Any, dims: ParallelDims, sequence_parallel: bool, loss_parallel: bool
) -> dict[str, ParallelStyle]:
    residual = residual_of(sequence_parallel)
    plan = outside_of_layers(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    for layer in layers(config, lambda number: config.layer_types[number] == "full_attention"):
        plan |= attention(layer, residual)
    for layer in layers(config, lambda number: config.layer_types[number] == "linear_attention"):
        plan |= delta_layers(layer, config, dims, residual, _by_heads(config))
    return plan


def _by_heads(config: Any) -> dict[str, Placement]:
    """Queries, keys and values are side by side in one projection; gates and rates have one of their own each."""
    single = dict.fromkeys(("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"), Shard(0))
    return {"in_proj_qkv.weight": PackedShard(0, packed(config)), **single}
