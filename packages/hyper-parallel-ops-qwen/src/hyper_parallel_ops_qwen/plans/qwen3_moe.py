"""The plan of Qwen3's mixtures of experts."""

from __future__ import annotations

from typing import Any

from hyper_parallel import ParallelDims, ParallelStyle, gated_mlp
from hyper_parallel_ops_qwen.plans.decoder_parts import (
    attention,
    has_experts,
    layers,
    mixture,
    outside_of_layers,
    residual_of,
)

__all__ = ["qwen3_moe_plan"]


def qwen3_moe_plan(
    config: Any, dims: ParallelDims, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3MoeForCausalLM``.

    Args:
        config: of the model.
        dims: degrees of parallelism; tp and ep say how experts are sharded.
        sequence_parallel: shard the sequence outside of attention and experts.
        loss_parallel: leave the logits sharded by vocabulary.
    """
    residual = residual_of(sequence_parallel)
    plan = outside_of_layers(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    plan |= attention("model.layers.*", residual)

    for layer in layers(config, lambda number: has_experts(config, number)):
        plan |= mixture(f"{layer}.mlp", config, residual)
    for layer in layers(config, lambda number: not has_experts(config, number)):
        plan |= gated_mlp(f"{layer}.mlp", residual, input=residual)
    return plan
