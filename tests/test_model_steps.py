"""One training step of each supported model, its code in ``transformers`` unmodified, equals that of one device.

The batch is sharded over dp, the weights of the main linear layers over tp. Sizes are tiny; compared are the loss, the
gradient of every parameter, the clipped norm, and every parameter after a step of AdamW.

Where the policy is not ``auto`` nothing but pending sums is ever redistributed: experts sort the tokens of the whole
batch, and each token travels to the rank that computes with it and back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    PackedShard,
    Replicate,
    Shard,
    ShardingPlan,
    check_results,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
    redistribute_policy,
    shard_module,
)
from hyper_parallel.rules import replicate_rest

R = Replicate()
OUT, IN = (R, Shard(0)), (R, Shard(1))  # of a linear layer's weight [out features, in features]

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ATTENTION = {
    "**.embed_tokens.weight": OUT,
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
    attention: str = "sdpa"
    experts: str | None = None
    padded: bool = False
    images: bool = False

    def build(self) -> torch.nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type, **{**SIZES, **self.sizes})
        torch.manual_seed(0)
        text_only = type(config) in transformers.AutoModelForCausalLM._model_mapping
        auto = transformers.AutoModelForCausalLM if text_only else transformers.AutoModelForImageTextToText
        model = auto.from_config(config)
        if model._supports_sdpa:
            model.set_attn_implementation(self.attention)
        if self.experts and model._can_set_experts_implementation():
            model.set_experts_implementation(self.experts)
        return model

    def inputs(self) -> dict[str, torch.Tensor]:
        """A batch, of which one dp rank ignores more than the other."""
        tokens = torch.randint(3, 128, (self.batch, 12))
        labels = tokens.clone()
        labels[0, :7] = -100
        if self.images:
            return with_images(tokens)
        if not self.padded:
            return {"input_ids": tokens, "labels": labels}
        mask = torch.ones_like(tokens)
        mask[0, 8:] = mask[1, 5:] = 0
        return {"input_ids": tokens, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}


SHARED = {
    "**.shared_expert*.gate_proj.weight": OUT,
    "**.shared_expert*.up_proj.weight": OUT,
    "**.shared_expert*.down_proj.weight": IN,
}
EMBEDDING = {"**.embed_tokens.weight": OUT, "lm_head.weight": OUT}
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

VISION_MLP = {"**.visual.blocks.*.mlp.linear_fc1.*": OUT, "**.visual.blocks.*.mlp.linear_fc2.weight": IN}
SPECIAL_TOKENS = {
    "image_token_id": 124, "video_token_id": 125, "vision_start_token_id": 126, "vision_end_token_id": 127,
}  # fmt: skip


def with_images(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """An image of 16 patches, four of which make a token, at another place in each sequence."""
    tokens = tokens.clamp(max=120)
    for row in range(len(tokens)):
        tokens[row, 1 + row], tokens[row, 2 + row : 6 + row], tokens[row, 6 + row] = 126, 124, 127
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "mm_token_type_ids": (tokens == 124).int(),
        "pixel_values": torch.randn(16 * len(tokens), 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(tokens)),
    }


STEPS = {
    "llama": Step("llama", plan=ATTENTION | MLP),
    "qwen3": Step("qwen3", plan=ATTENTION | MLP),
    "qwen3_moe": Step("qwen3_moe", EXPERTS, ATTENTION | MOE),
    "qwen3_vl_moe": Step(
        "qwen3_vl_moe",
        {"text_config": SIZES | EXPERTS, "vision_config": VISION},
        ATTENTION | MOE,
    ),
    # Without a cache, whose plain tensors cannot hold a sharded state: redistribute_policy("auto") would gather it.
    "qwen3_next": Step("qwen3_next", DELTA_SIZES | EXPERTS, ATTENTION | DELTA_NEXT | MOE | SHARED, use_cache=False),
    "qwen3_5": Step("qwen3_5_text", DELTA_SIZES, ATTENTION | DELTA_3_5 | MLP, use_cache=False),
    "qwen3_5_moe": Step(
        "qwen3_5_moe_text", DELTA_SIZES | EXPERTS, ATTENTION | DELTA_3_5 | MOE | SHARED, use_cache=False
    ),
    "deepseek_v3": Step("deepseek_v3", LATENT_SIZES, EMBEDDING | LATENT | MOE | SHARED),
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
    ),
}


def variant(name: str, **changes: Any) -> Step:
    """A step with other sizes or options."""
    step = STEPS[name]
    sizes = {**step.sizes, **changes.pop("sizes", {})}
    return replace(step, sizes=sizes, **changes)


DENSE = {"first_k_dense_replace": 2, "mlp_only_layers": [0, 1]}
VARIANTS = {f"{name}, uneven batch": variant(name, batch=3, policy="auto", use_cache=True) for name in STEPS} | {
    "qwen3_next, dense": variant("qwen3_next", sizes=DENSE, plan=ATTENTION | DELTA_NEXT | MLP),
    "deepseek_v3, dense": variant("deepseek_v3", sizes=DENSE, plan=EMBEDDING | LATENT | MLP),
    "deepseek_v32, dense": variant(
        "deepseek_v32", sizes={"mlp_layer_types": ["dense"] * 2}, plan=EMBEDDING | LATENT | MLP
    ),
    "llama, eager attention, padded": variant("llama", attention="eager", padded=True),
    "qwen3_5, padded": variant("qwen3_5", padded=True),
    "qwen3_moe, eager experts": variant("qwen3_moe", experts="eager"),
    "deepseek_v32, eager attention, padded": variant("deepseek_v32", attention="eager", padded=True),
    # Attention works image by image. Joined again they are packed, and what is added to them is not.
    "qwen3_vl_moe, images": variant(
        "qwen3_vl_moe", sizes=SPECIAL_TOKENS, plan=ATTENTION | MOE | VISION_MLP, images=True, policy="auto"
    ),
    "qwen3_vl, images": Step(
        "qwen3_vl",
        {"text_config": SIZES, "vision_config": VISION, **SPECIAL_TOKENS},
        ATTENTION | MLP | VISION_MLP,
        images=True,
        policy="auto",
    ),
    # Over two data ranks: one of them has nothing.
    "llama, one sequence": variant("llama", batch=1),
    "qwen3_moe, one sequence": variant("qwen3_moe", batch=1),
    "deepseek_v3, batched experts": variant("deepseek_v3", experts="batched_mm"),
}


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("name", [*STEPS, *VARIANTS])
def test_a_training_step_equals_that_of_one_device(name):
    step = (STEPS | VARIANTS)[name]
    model = step.build()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model, mesh, ShardingPlan(plan=dict(step.plan)))
    check_step(step, model, twin, mesh)


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("name", [*STEPS, "qwen3_vl, images", "qwen3_vl_moe, images"])
def test_a_fully_sharded_model_with_its_own_plan_takes_a_batch_over_data_ranks(name):
    """``parallelize_module`` with the plan of ``transformers``, then ``fully_shard``."""
    step = (STEPS | VARIANTS)[name]
    model = step.build()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    parallelize_module(model, mesh["tp"])
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    check_step(step, model, twin, mesh)


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next", "qwen3_5", "deepseek_v3"])
def test_a_training_step_is_what_it_states_all_through(name):
    """In check mode, with every parameter, buffer and input a DTensor."""
    step = STEPS[name]
    model = step.build()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model, mesh, ShardingPlan(plan=dict(step.plan)))
    replicate_rest(model, mesh)
    assert all(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers()))
    with check_results():
        check_step(step, model, twin, mesh)


def check_step(
    step: Step,
    model: torch.nn.Module,
    twin: torch.nn.Module,
    mesh: DeviceMesh,
    inputs: dict[str, torch.Tensor] | None = None,
    placements: tuple[Any, ...] | None = (Shard(0), R),
) -> None:
    """Compare a step with that of the twin.

    Args:
        inputs: the batch, by default that of ``step``.
        placements: how it is laid out; None leaves it plain.
    """
    inputs = step.inputs() if inputs is None else inputs
    want = twin(**inputs, use_cache=step.use_cache).loss
    want.backward()
    batch = inputs
    if placements is not None:
        batch = {k: distribute_tensor(v, mesh, placements, src_data_rank=None) for k, v in inputs.items()}
    with redistribute_policy(step.policy):
        loss = model(**batch, use_cache=step.use_cache).loss
        torch.testing.assert_close(whole(loss), want, rtol=1e-5, atol=1e-6)
        loss.backward()
    pairs = [(key, p, twin.get_parameter(key)) for key, p in model.named_parameters()]
    for key, mine, plain in pairs:
        if plain.grad is None:
            assert mine.grad is None or not mine.grad.full_tensor().any(), key
            mine.grad = None
            continue
        assert mine.grad is not None, key
        assert mine.grad.placements == mine.placements, key
        assert_near(key, mine.grad, plain.grad)

    norms = [step_of_adamw(m) for m in (model, twin)]
    torch.testing.assert_close(whole(norms[0]), norms[1], rtol=1e-5, atol=1e-6)
    for key, mine, plain in pairs:
        assert_near(key, mine, plain)


def step_of_adamw(model: torch.nn.Module) -> torch.Tensor:
    """Clip and step; the gradients' norm. The large eps keeps the sign of a gradient near zero from mattering."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2).step()
    return norm


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_near(key: str, mine: Any, plain: torch.Tensor) -> None:
    """Within 1e-5 of the largest value (at least of 1), which is the rounding of float32 sums in another order."""
    difference = (mine.detach().full_tensor() - plain.detach()).abs().max()
    assert difference <= 1e-5 * max(1, plain.detach().abs().max()), f"{key}: {difference}"
