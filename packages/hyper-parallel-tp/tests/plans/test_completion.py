"""Models of transformers without a recipe: what is sharded, what is whole and why, and the gradients of one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from tp_models import mesh, whole

from hyper_parallel import AttentionParallel, CommTrace, DTensor, parallelize_module
from hyper_parallel_tp.plans.completion import completed_plan

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "rotary_dim": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
NO_DROPOUT = dict.fromkeys(
    (
        "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "resid_dropout", "embed_dropout",
        "attn_pdrop", "resid_pdrop", "embd_pdrop", "layerdrop",
    ),
    0.0,
)  # fmt: skip

FAMILIES = {
    # with a plan that says all
    "granite": {},
    "gpt_neox": {},
    "gptj": OLD,
    # with a plan for some layers
    "granitemoe": EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    # with none
    "stablelm": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 16},
    "bloom": OLD,
    "falcon": {"multi_query": False},
    "persimmon": {},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 16},
    "gpt2": OLD | {"n_positions": 16},
}
WHOLE = {  # parameters with several dims, but for routers, that stay whole
    "opt": {"model.decoder.embed_positions.weight"},
    "gpt_neo": {"transformer.wpe.weight"},
    "gpt2": {
        "transformer.wpe.weight",
        *(f"transformer.h.{i}.{n}.weight" for i in (0, 1) for n in ("attn.c_attn", "attn.c_proj")),
        *(f"transformer.h.{i}.{n}.weight" for i in (0, 1) for n in ("mlp.c_fc", "mlp.c_proj")),
    },
    "lfm2": set(),
}


def build(family, **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | NO_DROPOUT | FAMILIES[family] | changes)
    return transformers.AutoModelForCausalLM.from_config(config).float().train()


def is_whole(parameter):
    return all(p.is_replicate() for p in parameter.placements)


def step(model):
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_one_device(family):
    model = build(family)
    twin = copy.deepcopy(model)
    parallelize_module(model, mesh())
    found = {n for n, p in model.named_parameters() if p.ndim > 1 and "router" not in n and is_whole(p)}
    assert {n for n in found if ".conv." not in n} == WHOLE.get(family, set())
    torch.testing.assert_close(step(model), step(twin), rtol=1e-6, atol=0)
    size = torch.stack([p.grad.norm() for p in twin.parameters() if p.grad is not None]).norm()
    for (name, got), want in zip(model.named_parameters(), twin.parameters(), strict=True):
        # A bias of keys that softmax does not see has a gradient of rounding errors.
        assert (whole(got.grad) - want.grad).norm() <= 1e-5 * max(want.grad.norm(), 1e-3 * size), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["stablelm", "opt", "bloom"])
def test_a_recognised_layer_costs_two_all_reduces_each_way(family):
    model = build(family)
    parallelize_module(model, mesh())
    with CommTrace() as trace:
        step(model)
    assert trace.counts == {"all_reduce": 5 + 5, "all_gather": 1}  # with embedding and head, whose logits are gathered


def test_what_stays_whole_and_why():
    def reasons(family, ranks, **changes):
        with torch.device("meta"):
            source, styles, found = completed_plan(build(family, **changes), ranks)
        return source, styles, found

    source, styles, found = reasons("stablelm", 4)
    assert source == "the layers of StableLmForCausalLM that are recognised"
    assert isinstance(styles["model.layers.0.self_attn"], AttentionParallel)
    assert list(styles)[-1] == ""
    key = "model.layers.1.self_attn.{}_proj.weight"
    assert found == {
        f"model.layers.{i}.self_attn.{part}_proj.weight": "tp=4 does not divide its key and value heads"
        for i in (0, 1)
        for part in "kv"
    }
    assert reasons("stablelm", 3)[2][key.format("q")] == "tp=3 does not divide its 4 heads"
    assert reasons("bloom", 3)[2]["transformer.h.0.self_attention.dense.weight"] == "tp=3 does not divide its 4 heads"
    source, _, found = reasons("granitemoe", 2)
    assert source == "the tp_plan of GraniteMoeForCausalLM, completed by attention by heads"
    router = "model.layers.0.block_sparse_moe.router.weight"
    assert found[router] == "GraniteMoeTopKRouter is neither nn.Linear nor nn.Embedding, and no plan names it"
    assert reasons("gpt2", 2)[2]["transformer.h.0.mlp.c_fc.weight"].startswith("Conv1D is neither nn.Linear")
    assert reasons("stablelm", 2, tie_word_embeddings=True)[2] == {}


def test_layers_of_other_modules_are_not_guessed():
    block = nn.Module()
    block.fc1, block.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)
    assert completed_plan(block, 2) is None


@pytest.mark.ranks(2)
def test_tied_embedding_and_head_are_one_parameter():
    model = build("stablelm", tie_word_embeddings=True)
    twin = copy.deepcopy(model)
    parallelize_module(model, mesh())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, DTensor)
    torch.testing.assert_close(step(model), step(twin), rtol=1e-6, atol=0)
    torch.testing.assert_close(model.lm_head.weight.grad.full_tensor(), twin.lm_head.weight.grad, rtol=1e-5, atol=1e-6)
