"""Models of `transformers` in sizes for a CPU: the same code and plans as the large ones."""

from __future__ import annotations

from typing import Any

import transformers

_DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
_LATENTS = {
    "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "qwen3_next": ("qwen3_next", {**_DELTA, **_EXPERTS, **_SHARED_EXPERT}),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_DELTA, **_EXPERTS, **_SHARED_EXPERT}),
    "deepseek_v3": ("deepseek_v3", {**_LATENTS, **_ROUTED_EXPERTS}),
    "deepseek_v32": (
        "deepseek_v32",
        {**_LATENTS, **_ROUTED_EXPERTS, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 32},
    ),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}),
}
"""By name: the model type in `transformers`, and the sizes that its family has beside those of all."""


def small_config(name: str, *, vocabulary: int, hidden: int, layers: int, length: int) -> Any:
    """The configuration of a small model.

    Args:
        name: a key of `MODELS`.
        vocabulary: number of tokens.
        hidden: features of a token between layers, a multiple of 16.
        layers: number of decoder layers; the families with several kinds of layers have each from 4 on.
        length: of the longest sequence.
    """
    model_type, sizes = MODELS[name]
    common = {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
        "max_position_embeddings": length, "dtype": "float32",
    }  # fmt: skip
    return transformers.AutoConfig.for_model(model_type, **{**common, **sizes})
