"""The plans that transformers' models carry, translated: loss, logits and every gradient of one device."""

from __future__ import annotations

import pytest
import torch
from tp_models import Mlp, check_gradients, language_model, mesh, whole

from hyper_parallel import ColwiseParallel, NoParallel, PackedShard, Shard, parallelize_module
from hyper_parallel_tp.plans.decoders import qwen3_vl_plan
from hyper_parallel_tp.plans.transformers import transformers_plan
from hyper_parallel_tp.styles.attention import AttentionParallel
from hyper_parallel_tp.styles.local_compute import LocalCompute

pytest.importorskip("transformers")

# The kernel of experts wants slices of a multiple of 16 bytes.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Family -> what its configuration needs beside the common sizes.
FAMILIES = {
    "Qwen2": {},
    "Mistral": {},
    "Phi3": {},  # fused QKV and gate-up, gathered
    "Gemma2": {},
    "Olmo2": {},  # a norm over all heads
    "Glm4": {},
    "Cohere": {},  # a parallel block, logits scaled
    "Starcoder2": {},  # biases
    "Qwen3Moe": {"num_experts": 4, "decoder_sparse_step": 1, **EXPERTS},
    "Qwen2Moe": {"num_experts": 4, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 16, **EXPERTS},
    "Glm4Moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS},
    "Apertus": {},  # an activation with parameters
    "Nemotron": {},  # LayerNorm1P, squared ReLU
    "Mixtral": {"num_local_experts": 4, "intermediate_size": 16},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "head_dim": 4,
        **EXPERTS,
    },
}


def build(family, device="cpu"):
    return language_model(family, device, **FAMILIES.get(family, {}))


def check_step(model, twin):
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    out, want = model(input_ids=ids, labels=ids), twin(input_ids=ids, labels=ids)
    assert type(out.loss) is torch.Tensor
    assert type(out.logits) is torch.Tensor
    torch.testing.assert_close(out.logits, want.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.loss, want.loss)
    out.loss.backward()
    want.loss.backward()
    for (name, parameter), single in zip(model.named_parameters(), twin.parameters(), strict=True):
        found = parameter.grad
        assert (found is None) == (single.grad is None), name
        if found is not None:
            torch.testing.assert_close(
                found.full_tensor(), single.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_equals_one_device(family):
    model, twin = build(family), build(family)
    parallelize_module(model, mesh())
    check_step(model, twin)


def vision_language_model():
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    text = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope, "pad_token_id": 0}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen3VLForConditionalGeneration(config).float().train()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [None, {"sequence_parallel": True, "loss_parallel": True}])
def test_a_model_that_looks_at_pictures(options):
    """Qwen3-VL: four tokens of a picture in thirteen, with and without a sequence that is split."""
    model, twin = vision_language_model(), vision_language_model()
    parallelize_module(model, mesh(), None if options is None else qwen3_vl_plan(**options))
    assert model.model.language_model.layers[1].mlp.up_proj.weight.placements == (Shard(0),)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 80, (1, 13), generator=generator)
    ids[0, 2:8] = torch.tensor([92, 90, 90, 90, 90, 93])
    batch = {"input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": (ids == 90).long()}
    batch |= {"pixel_values": torch.randn(16, 96, generator=generator), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    loss, want = model(**batch).loss, twin(**batch).loss
    torch.testing.assert_close(whole(loss), want)
    loss.backward()
    want.backward()
    for (name, parameter), single in zip(model.named_parameters(), twin.parameters(), strict=True):
        if single.grad is not None:
            found = whole(parameter.grad)
            torch.testing.assert_close(found, single.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", ["Mistral", "Qwen3Moe", "Exaone4"])
def test_fewer_key_value_heads_than_ranks(family):
    model, twin = build(family), build(family)
    parallelize_module(model, mesh(4))
    check_step(model, twin)


@pytest.mark.ranks(2)
def test_a_plan_that_the_user_gave_the_model():
    model, twin = build("Qwen2"), build("Qwen2")
    model.tp_plan = {
        "model.embed_tokens": "embedding_colwise",
        "model.layers.*.self_attn.q_proj": "colwise_rep",
        "model.layers.*.self_attn.o_proj": "rowwise_rep",
        "model.layers.*.mlp.gate_proj": "packed_colwise",
        "model.layers.*.mlp.up_proj": "packed_colwise",
        "model.layers.*.mlp.down_proj": "packed_rowwise",
        "model.layers.*.mlp": "all_reduce",
        "model.layers.*.post_attention_layernorm": "replicate",
        "model.norm": "sequence_parallel",
        "lm_head": "colwise_gather_output",
    }
    parallelize_module(model, mesh())
    layer = model.model.layers[0]
    assert layer.mlp.gate_proj.weight.placements == (PackedShard(0, (22, 22)),)
    assert layer.mlp.down_proj.weight.placements == (PackedShard(1, (22, 22)),)
    assert model.model.embed_tokens.weight.placements == (Shard(1),)
    check_step(model, twin)


def test_every_rule_becomes_a_style():
    """Of a mixture of experts, on the meta device: what is parallelised how."""
    model = build("Qwen3Moe", device="meta")
    plan = transformers_plan(model)
    assert isinstance(plan["model.layers.0.self_attn"], AttentionParallel)
    assert not any(name.endswith(("q_proj", "q_norm", "mlp.gate")) for name in plan)
    experts = plan["model.layers.1.mlp.experts"]
    assert isinstance(experts, LocalCompute)
    assert experts.parameters == {"gate_up_proj": PackedShard(1, (16, 16)), "down_proj": Shard(2)}
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts.gate_up_proj": "colwise"}  # as Inkling has it
    assert transformers_plan(model)["model.layers.1.mlp.experts"].parameters == experts.parameters
    assert isinstance(plan["lm_head"], ColwiseParallel)
    assert isinstance(plan[""], NoParallel)
    assert transformers_plan(Mlp()) is None


def test_all_words_of_the_installed_transformers_are_known():
    """A word that a new version adds is found here, not by a user."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    from hyper_parallel_tp.plans import transformers as translation

    known = {*translation.MODULE_STYLES, *translation.WHOLE, *translation.FOLLOWS}
    known |= {"moe_tp_experts", "packed_colwise", "packed_rowwise"}
    of_experts = {"ep_dispatch_experts", "grouped_gemm"}  # expert parallel, another plan
    assert set(ALL_PARALLEL_STYLES.keys()) - of_experts <= known


def test_words_and_names_that_mean_nothing():
    model = build("Qwen2", device="meta")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "colwize"}
    with pytest.raises(
        ValueError, match=r"has 'colwize' for 'model\.layers\.0\.mlp\.up_proj'; known are all_reduce, colwise"
    ):
        transformers_plan(model)
    model._tp_plan = {"transformer.h.*.attn": "colwise"}
    with pytest.raises(ValueError, match="names no part of it"):
        transformers_plan(model)


@pytest.mark.ranks(2)
def test_a_base_model_returns_plain_hidden_states():
    model, twin = build("Qwen2").model.double(), build("Qwen2").model.double()
    parallelize_module(model, mesh())
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    out, want = model(input_ids=ids), twin(input_ids=ids)
    assert type(out.last_hidden_state) is torch.Tensor
    torch.testing.assert_close(out.last_hidden_state, want.last_hidden_state)
    out.last_hidden_state.pow(2).sum().backward()
    want.last_hidden_state.pow(2).sum().backward()
    check_gradients(model, twin)
