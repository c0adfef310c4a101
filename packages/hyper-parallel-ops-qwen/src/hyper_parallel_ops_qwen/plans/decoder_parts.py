"""Parts that the plans of Qwen's decoders share: what is outside of layers, attention, delta layers, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel import (
    AttentionParallel,
    LocalCompute,
    NoParallel,
    PackedShard,
    ParallelDims,
    ParallelStyle,
    Placement,
    PositionwiseParallel,
    PrepareModuleInputOutput,
    Replicate,
    Shard,
    decoder_ends,
    expert_mixture,
    experts_by_features,
)

__all__ = [
    "attention",
    "delta_layers",
    "has_experts",
    "layers",
    "mixture",
    "outside_of_layers",
    "packed",
    "residual_of",
]

Plan = dict[str, ParallelStyle]


def residual_of(sequence_parallel: bool) -> Placement:
    """How the hidden states between attention and MLP are laid out, ``[batch, sequence, features]``."""
    return Shard(1) if sequence_parallel else Replicate()


def outside_of_layers(*, sequence_parallel: bool, loss_parallel: bool) -> Plan:
    """Embedding and head by vocabulary, and all norms of the residual stream."""
    norm = PositionwiseParallel(layout=residual_of(sequence_parallel))
    return {
        **decoder_ends(residual_of(sequence_parallel), norm, loss_parallel=loss_parallel),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.post_attention_layernorm": norm,
    }


def layers(config: Any, wanted: Callable[[int], bool]) -> list[str]:
    """Names of the layers for which ``wanted`` holds: one pattern for all of them, or each by its number."""
    numbers = [number for number in range(config.num_hidden_layers) if wanted(number)]
    if len(numbers) == config.num_hidden_layers:
        return ["model.layers.*"]
    return [f"model.layers.{number}" for number in numbers]


def has_experts(config: Any, number: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    sparse = config.num_experts > 0 and (number + 1) % config.decoder_sparse_step == 0
    return sparse and number not in config.mlp_only_layers


def attention(layer: str, residual: Placement) -> Plan:
    """Attention by heads. Where each head's query has a gate beside it in one projection, they stay together."""
    return {f"{layer}.self_attn": AttentionParallel(input_layouts=residual, output_layouts=residual)}


def delta_layers(
    layer: str, config: Any, dims: ParallelDims, residual: Placement, projections: Mapping[str, Placement]
) -> Plan:
    """A gated delta net by heads, on plain local tensors: key heads with the value heads that belong to them.

    Where tp does not divide the key heads the layer is whole on every rank.

    Args:
        layer: name of the layers.
        config: of the model.
        dims: degrees of parallelism.
        residual: of the hidden states between blocks.
        projections: placements of the weights of its input projections.
    """
    if config.linear_num_key_heads % dims.tp or config.linear_num_value_heads % dims.tp:
        return {
            f"{layer}.linear_attn": PrepareModuleInputOutput(
                input_layouts=residual,
                desired_input_layouts=Replicate(),
                output_layouts=Replicate(),
                desired_output_layouts=residual,
                use_local_output=False,
            )
        }
    placements = {
        **projections,
        "conv1d.weight": PackedShard(0, packed(config)),
        "A_log": Shard(0),
        "dt_bias": Shard(0),
        "out_proj.weight": Shard(1),
    }
    counts = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
    return {
        f"{layer}.linear_attn": LocalCompute(
            parameters=placements, divided=counts, input_layouts=residual, output_layouts=residual
        )
    }


def packed(config: Any) -> tuple[int, int, int]:
    """Features of all queries, keys and values of a delta layer, which are side by side in one tensor."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def mixture(name: str, config: Any, residual: Placement, *, shared: bool = False) -> Plan:
    """A mixture of experts by features; the router is whole, and so is the gate of a shared expert."""
    experts = experts_by_features(config.moe_intermediate_size)
    if not shared:
        return expert_mixture(name, residual, experts)
    gate = {f"{name}.shared_expert_gate": NoParallel(use_local_output=False)}
    return {**expert_mixture(name, residual, experts, shared="shared_expert"), **gate}
