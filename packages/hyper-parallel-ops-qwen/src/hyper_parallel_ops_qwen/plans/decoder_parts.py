"""Parts that the plans of Qwen's decoders share: what is outside of layers, attention, delta layers, MLPs, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel import (
    AttentionParallel,
    ColwiseParallel,
    LocalCompute,
    NoParallel,
    PackedShard,
    ParallelDims,
    ParallelStyle,
    Partial,
    Placement,
    PositionwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    Replicate,
    RowwiseParallel,
    Shard,
)

__all__ = [
    "attention",
    "delta_layers",
    "experts_style",
    "has_experts",
    "layers",
    "mixture",
    "mlp",
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
    residual = residual_of(sequence_parallel)
    norm = PositionwiseParallel(layout=residual)
    embedded = {"inputs_embeds": Replicate()}  # in the place of token ids
    return {
        "model": PrepareModuleInput(
            input_kwarg_layouts=embedded, desired_input_kwarg_layouts=dict.fromkeys(embedded, residual)
        ),
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=residual, use_local_output=False
        ),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.post_attention_layernorm": norm,
        "model.norm": norm,
        "lm_head": ColwiseParallel(
            input_layouts=residual,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
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


def mlp(name: str, residual: Placement) -> Plan:
    """A gated MLP by features."""
    return {
        name: PrepareModuleInput(input_layouts=residual, desired_input_layouts=Replicate()),
        **_features(name, residual),
    }


def _features(name: str, output: Placement) -> Plan:
    split = ColwiseParallel(use_local_output=False)
    return {
        f"{name}.gate_proj": split,
        f"{name}.up_proj": split,
        f"{name}.down_proj": RowwiseParallel(output_layouts=output, use_local_output=False),
    }


def mixture(name: str, config: Any, residual: Placement, *, shared: bool = False) -> Plan:
    """A mixture of experts; the router is whole, and so is the gate of a shared expert.

    What experts and the shared one compute are terms of one sum, so that the block costs one collective each way.
    """
    whole = NoParallel(use_local_output=False)
    plan: Plan = {
        name: PrepareModuleInputOutput(
            input_layouts=residual,
            desired_input_layouts=Replicate(),
            output_layouts=Partial(),
            desired_output_layouts=residual,
            use_local_output=False,
        ),
        f"{name}.gate": whole,
        f"{name}.experts": experts_style(config),
    }
    if shared:
        plan |= {f"{name}.shared_expert_gate": whole, **_features(f"{name}.shared_expert", Partial())}
    return plan


def experts_style(config: Any) -> ParallelStyle:
    """Every expert by its features; gate and up are packed in one weight ``[experts, 2 * features, hidden]``."""
    features = config.moe_intermediate_size
    return LocalCompute(
        parameters={"gate_up_proj": PackedShard(1, (features, features)), "down_proj": Shard(2)},
        output_layouts=Partial(),
    )
