"""Small models of ``transformers``, how their weights are sharded, and the comparison of a training step.

The batch is sharded over dp, the weights of the main linear layers over tp. Sizes are tiny; compared are the loss, the
gradient of every parameter, the clipped norm, and every parameter after a step of AdamW.

Where the policy is not ``auto`` nothing but pending sums is ever redistributed: experts sort the tokens of the whole
batch, and each token travels to the rank that computes with it and back.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    PackedShard,
    Replicate,
    Shard,
    distribute_tensor,
    redistribute_policy,
)

sys.path.insert(0, str(Path(__file__).parents[1]))  # here and on the ranks

from tools.model_cells.zoo import (
    COMPRESSED_SIZES,
    DELTA_SIZES,
    EXPERTS,
    INDEXER_SIZES,
    LATENT_SIZES,
    SIZES,
    SPECIAL_TOKENS,
    VISION,
)

R = Replicate()
OUT, IN = (R, Shard(0)), (R, Shard(1))  # of a linear layer's weight [out features, in features]


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
        LATENT_SIZES | INDEXER_SIZES,
        EMBEDDING | LATENT | MOE | SHARED,
    ),
    "deepseek_v4": Step(
        "deepseek_v4",
        COMPRESSED_SIZES,
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
