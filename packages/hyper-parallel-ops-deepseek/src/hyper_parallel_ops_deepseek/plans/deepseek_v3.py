"""The plans of DeepSeek-V3 and V3.2: attention on latents by heads, dense first layers, then mixtures of experts."""

from __future__ import annotations

from typing import Any

from hyper_parallel import LatentAttentionParallel, ParallelDims, gated_mlp
from hyper_parallel_ops_deepseek.plans.parts import (
    Plan,
    check_dropout,
    mixture,
    outside_of_layers,
    per_position,
    residual_of,
)

__all__ = ["deepseek_v32_plan", "deepseek_v3_plan"]


def deepseek_v3_plan(config: Any, dims: ParallelDims, *, sequence_parallel: bool, loss_parallel: bool) -> Plan:
    """The plan of ``transformers.DeepseekV3ForCausalLM``.

    Args:
        config: the model's; it may have no latent for queries (``q_lora_rank=None``).
        dims: degrees of parallelism.
        sequence_parallel: the sequence is split outside of attention and MLP, and latents are gathered.
        loss_parallel: the logits stay split by vocabulary.

    Raises:
        ValueError: attention weights are dropped.
    """
    dense = min(config.first_k_dense_replace, config.num_hidden_layers)
    has_latent_queries = config.q_lora_rank is not None
    attention = LatentAttentionParallel(
        latents={"q_a_proj": "q_a_layernorm", "kv_a_proj_with_mqa": "kv_a_layernorm"} if has_latent_queries else {},
        heads=("q_b_proj" if has_latent_queries else "q_proj", "kv_b_proj"),
        output="o_proj",
        input_layouts=residual_of(sequence_parallel),
        output_layouts=residual_of(sequence_parallel),
    )
    kinds = ["dense" if layer < dense else "sparse" for layer in range(config.num_hidden_layers)]
    return _plan(config, dims, attention, kinds, sequence_parallel, loss_parallel)


def deepseek_v32_plan(config: Any, dims: ParallelDims, *, sequence_parallel: bool, loss_parallel: bool) -> Plan:
    """The plan of ``transformers.DeepseekV32ForCausalLM``; arguments as of :func:`deepseek_v3_plan`.

    The indexer, which says what each position looks at, is whole on every rank. What it makes of single positions is
    computed where these are, and gathered with the latents.
    """
    attention = LatentAttentionParallel(
        latents={"q_a_proj": "q_a_layernorm", "kv_a_proj_with_mqa": "kv_a_layernorm"},
        without_gradient={"indexer.wk": None, "indexer.weights_proj": None},
        heads=("q_b_proj", "kv_b_proj"),
        output="o_proj",
        input_layouts=residual_of(sequence_parallel),
        output_layouts=residual_of(sequence_parallel),
    )
    return _plan(config, dims, attention, config.mlp_layer_types, sequence_parallel, loss_parallel)


def _plan(
    config: Any,
    dims: ParallelDims,
    attention: LatentAttentionParallel,
    kinds: list[str],
    sequence_parallel: bool,
    loss_parallel: bool,
) -> Plan:
    check_dropout(config, dims)
    residual = residual_of(sequence_parallel)
    plan = outside_of_layers(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    for layer, kind in enumerate(kinds):
        name = f"model.layers.{layer}"
        plan[f"{name}.input_layernorm"] = per_position(sequence_parallel)
        plan[f"{name}.self_attn"] = attention
        plan[f"{name}.post_attention_layernorm"] = per_position(sequence_parallel)
        if kind == "sparse":
            plan |= mixture(f"{name}.mlp", config, residual)
        else:
            plan |= gated_mlp(f"{name}.mlp", residual, input=residual)
    return plan
