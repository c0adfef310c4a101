"""One training step of each supported model, its code in ``transformers`` unmodified, equals that of one device.

The batch is sharded over dp, the weights of the main linear layers over tp. Sizes are tiny; compared are the loss and
the gradient of every parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hyper_parallel import (
    PackedShard,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    redistribute_policy,
    shard_module,
)

R = Replicate()
OUT, IN = (R, Shard(0)), (R, Shard(1))  # of a linear layer's weight [out features, in features]

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ATTENTION = {
    "model.embed_tokens.weight": OUT,
    "lm_head.weight": OUT,
    "**.self_attn.[qkv]_proj.weight": OUT,
    "**.self_attn.o_proj.weight": IN,
}
MLP = {"**.mlp.gate_proj.weight": OUT, "**.mlp.up_proj.weight": OUT, "**.mlp.down_proj.weight": IN}
# Of each expert the gate and up projections are one weight [experts, 2 * features, hidden].
MOE = {"**.experts.gate_up_proj": (R, PackedShard(1, (32, 32))), "**.experts.down_proj": (R, Shard(2))}


@dataclass
class Step:
    """A small model: its type, sizes, and the layout of its weights."""

    model_type: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "partial"
    batch: int = 4
    use_cache: bool = True

    def build(self) -> torch.nn.Module:
        transformers = pytest.importorskip("transformers")
        config = transformers.AutoConfig.for_model(self.model_type, **{**SIZES, **self.sizes})
        torch.manual_seed(0)
        if type(config) in transformers.AutoModelForCausalLM._model_mapping:
            return transformers.AutoModelForCausalLM.from_config(config)
        return transformers.AutoModelForImageTextToText.from_config(config)


SHARED = {
    "**.shared_expert*.gate_proj.weight": OUT,
    "**.shared_expert*.up_proj.weight": OUT,
    "**.shared_expert*.down_proj.weight": IN,
}
EMBEDDING = {"model.embed_tokens.weight": OUT, "lm_head.weight": OUT}
LATENT = {
    "**.self_attn.q_b_proj.weight": OUT,
    "**.self_attn.kv_b_proj.weight": OUT,
    "**.self_attn.o_proj.weight": IN,
}
LATENT_SIZES = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip

VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip


def without(plan: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in plan.items() if key != name}


DELTA_SIZES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32,
}  # fmt: skip
QKV = (R, PackedShard(0, (16, 16, 32)))  # queries, keys and values side by side
DELTA = {
    "**.linear_attn.conv1d.weight": QKV,
    "**.linear_attn.dt_bias": OUT,
    "**.linear_attn.A_log": OUT,
    "**.linear_attn.out_proj.weight": IN,
}
DELTA_NEXT = DELTA | {"**.linear_attn.in_proj_*.weight": OUT}
DELTA_3_5 = DELTA | {"**.linear_attn.in_proj_qkv.weight": QKV, "**.linear_attn.in_proj_[zba].weight": OUT}

STEPS = {
    "llama": Step("llama", plan=ATTENTION | MLP),
    "llama, uneven batch": Step("llama", plan=ATTENTION | MLP, policy="auto", batch=3),
    "qwen3": Step("qwen3", plan=ATTENTION | MLP),
    "qwen3_moe": Step("qwen3_moe", EXPERTS, ATTENTION | MOE, policy="auto"),
    "qwen3_vl_moe": Step(
        "qwen3_vl_moe",
        {"text_config": SIZES | EXPERTS, "vision_config": VISION},
        {"**.embed_tokens.weight": OUT, **without(ATTENTION, "model.embed_tokens.weight"), **MOE},
        policy="auto",
    ),
    "qwen3_next": Step("qwen3_next", DELTA_SIZES | EXPERTS, ATTENTION | DELTA_NEXT | MOE | SHARED, policy="auto"),
    # Without a cache, which would be plain tensors that take a sharded state.
    "qwen3_5": Step("qwen3_5_text", DELTA_SIZES, ATTENTION | DELTA_3_5 | MLP, use_cache=False),
    "qwen3_5_moe": Step("qwen3_5_moe_text", DELTA_SIZES | EXPERTS, ATTENTION | DELTA_3_5 | MOE | SHARED, policy="auto"),
    "deepseek_v3": Step("deepseek_v3", LATENT_SIZES, EMBEDDING | LATENT | MOE | SHARED, policy="auto"),
    "deepseek_v32": Step(
        "deepseek_v32",
        LATENT_SIZES
        | {
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 6,
            "layer_types": ["indexed_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse"],
        },
        EMBEDDING | LATENT | MOE | SHARED,
        policy="auto",
    ),
    "deepseek_v4": Step(
        "deepseek_v4",
        {  # one latent head for all queries
            "num_key_value_heads": 1,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "moe_intermediate_size": 32,
            "sliding_window": 8,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "mlp_layer_types": ["hash_moe", "moe"],
        },
        EMBEDDING
        | MOE
        | SHARED
        | {
            "**.self_attn.q_b_proj.weight": OUT,
            "**.self_attn.sinks": (R, Shard(0)),
            "**.self_attn.o_a_proj.weight": OUT,
            "**.self_attn.o_b_proj.weight": IN,
        },
        policy="auto",
    ),
}


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_equals_that_of_one_device(name):
    step = STEPS[name]
    model = step.build()
    twin = copy.deepcopy(model)
    tokens = torch.randint(3, 128, (step.batch, 12))
    labels = tokens.clone()
    labels[0, :7] = -100  # ignored, on one dp rank only
    want = twin(input_ids=tokens, labels=labels, use_cache=step.use_cache).loss
    want.backward()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model, mesh, ShardingPlan(plan=dict(step.plan)))
    batch = {
        name: distribute_tensor(value, mesh, (Shard(0), R), src_data_rank=None)
        for name, value in (("input_ids", tokens), ("labels", labels))
    }
    with redistribute_policy(step.policy):
        loss = model(**batch, use_cache=step.use_cache).loss
        torch.testing.assert_close(loss.full_tensor(), want, rtol=1e-5, atol=1e-6)
        loss.backward()
    for (key, mine), (_, plain) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        if plain.grad is None:
            assert mine.grad is None or not mine.grad.full_tensor().any(), key
            continue
        assert mine.grad is not None, key
        assert mine.grad.placements == mine.placements, key
        difference = (mine.grad.full_tensor() - plain.grad).abs().max()
        assert difference <= 1e-5 * max(1, plain.grad.abs().max()), f"{key}: {difference}"
