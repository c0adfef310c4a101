"""The plan of DeepSeek-V4: one latent head for all queries, compressed keys, groups of heads in the output projection,
several residual streams (hyper-connections), and a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from hyper_parallel import LatentAttentionParallel, ParallelDims, ParallelStyle, Placement
from hyper_parallel_ops_deepseek.plans.parts import (
    Plan,
    check_dropout,
    mixture,
    outside_of_layers,
    per_position,
    residual_of,
)

__all__ = ["deepseek_v4_plan"]

_LATENTS = {"q_a_proj": "q_a_norm", "kv_proj": "kv_norm"}
_COMPRESSED = {"compressor.kv_proj": None, "compressor.gate_proj": None}
_INDEXED = {
    "compressor.indexer.kv_proj": None,
    "compressor.indexer.gate_proj": None,
    "compressor.indexer.scorer.weights_proj": None,
}


def deepseek_v4_plan(config: Any, dims: ParallelDims, *, sequence_parallel: bool, loss_parallel: bool) -> Plan:
    """The plan of ``transformers.DeepseekV4ForCausalLM``.

    Queries are split by heads, and the output projection by groups of them. Keys, which all heads share, their
    compression and the indexer are whole on every rank; what these make of single positions is computed where the
    positions are, and gathered with the latents. Hyper-connections work position by position.

    Args:
        config: the model's.
        dims: degrees of parallelism.
        sequence_parallel: the sequence is split outside of attention and MLP, and latents are gathered.
        loss_parallel: the logits stay split by vocabulary.

    Raises:
        ValueError: attention weights are dropped.
    """
    check_dropout(config, dims)
    residual = residual_of(sequence_parallel)
    plan = outside_of_layers(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    plan["model.hc_head"] = per_position(sequence_parallel)
    for layer, kind in enumerate(config.layer_types):
        name = f"model.layers.{layer}"
        for part in ("attn_hc", "ffn_hc", "input_layernorm", "post_attention_layernorm"):
            plan[f"{name}.{part}"] = per_position(sequence_parallel)
        plan[f"{name}.self_attn"] = _attention(kind, residual)
        plan |= mixture(f"{name}.mlp", config, residual)
    return plan


def _attention(kind: str, residual: Placement) -> ParallelStyle:
    """Of a layer that sees a window, or compressed keys beyond it, or those of them that an indexer chooses."""
    return LatentAttentionParallel(
        latents=_LATENTS if kind == "sliding_attention" else _LATENTS | _COMPRESSED,
        without_gradient=_INDEXED if kind == "compressed_sparse_attention" else {},
        heads=("q_b_proj", "o_a_proj"),
        output="o_b_proj",
        per_head=("sinks",),
        divided=("num_key_value_groups", "config.o_groups", "o_a_proj.n_groups"),
        input_layouts=residual,
        output_layouts=residual,
    )
