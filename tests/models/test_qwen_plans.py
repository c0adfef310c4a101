"""The plans of Qwen's language models: gradients of one process, and no more communication than they need."""

import copy
from contextlib import contextmanager

import pytest
import torch
import transformers
from tools.model_cells.float64 import float64_throughout

from hyper_parallel import CommTrace, DTensor, ParallelDims, parallelize
from hyper_parallel.registry.registry import default_registry

DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 24}
FAMILIES = {
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_next": DELTA | EXPERTS | SHARED,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS | SHARED,
}
LAYERS = 3


@contextmanager
def in_float64():
    """Norms, softmax and delta rules too, which ask for float32."""
    default_registry().find(torch.Tensor.float)  # functions are listed by name before names change
    with float64_throughout():
        yield


KINDS = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}


def small(family, **changes):
    """In float64 and with plain loops over experts: what is compared is the sharding, not a kernel's rounding."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 67, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": LAYERS, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    kinds = {} if family == "qwen3_moe" else KINDS
    config = transformers.AutoConfig.for_model(family, **{**sizes, **kinds, **FAMILIES[family], **changes})
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    return model, copy.deepcopy(model)


def batch(rows=4, length=13):
    ids = torch.randint(0, 67, (rows, length), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, :4], labels[1, :4] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def check_gradients(model, single):
    """In float64 throughout: what would be left is no rounding."""
    for (name, got), want in zip(model.named_parameters(), single.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            whole = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
            assert (whole - want.grad).norm() <= 1e-9 * want.grad.norm(), name


def check_gradients_and_counts(family, sharded, tp):
    """As on one process, and per attention, delta layer, MLP or mixture one collective each way, and one more for the
    embedding or the head. Backward, each layer sums what is whole in it (norms, routers) once more."""
    model, single = small(family)
    parallelize(model, ParallelDims(tp=tp), sequence_parallel=sharded, loss_parallel=sharded)
    with CommTrace() as trace:
        output = model(**batch())
        output.loss.backward()
    wanted = single(**batch())
    wanted.loss.backward()
    assert output.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-9)
    check_gradients(model, single)
    blocks = 2 * LAYERS + 1
    # The norms of single heads that scale by 1 + weight are summed by themselves; so is the last norm.
    sums = LAYERS + 1 + (0 if family == "qwen3_moe" else 2)
    forward, backward = trace.phase("forward"), trace.phase("backward")
    if sharded:
        assert forward == {"all_gather": blocks, "reduce_scatter": blocks, "all_reduce": 2}  # two of the loss
        assert (backward["all_gather"], backward["reduce_scatter"]) == (blocks, blocks)
        assert backward["all_reduce"] <= sums
    else:
        assert forward == {"all_reduce": blocks, "all_gather": 1}  # of the logits
        assert set(backward) == {"all_reduce"}
        assert backward["all_reduce"] <= blocks + sums


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sequence and loss"])
@pytest.mark.parametrize("family", FAMILIES)
@in_float64()
def test_gradients_and_counts_on_two_ranks(family, sharded):
    check_gradients_and_counts(family, sharded, 2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sequence and loss"])
@pytest.mark.parametrize("family", FAMILIES)
@in_float64()
def test_gradients_and_counts_with_more_ranks_than_key_heads(family, sharded):
    check_gradients_and_counts(family, sharded, 4)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
@in_float64()
def test_tied_embeddings(family):
    model, single = small(family, tie_word_embeddings=True)
    parallelize(model, ParallelDims(tp=4))
    model(**batch()).loss.backward()
    single(**batch()).loss.backward()
    check_gradients(model, single)


@pytest.mark.ranks(2)
def test_delta_layers_send_no_more_than_hidden_states():
    """The default, which computes the delta rule whole on every rank, sends 610 KiB for this model and batch."""
    model, _ = small("qwen3_5_text")
    model.float()
    parallelize(model, ParallelDims(tp=2), sequence_parallel=False, loss_parallel=True)
    ids = torch.zeros(4, 40, dtype=torch.int64)
    with CommTrace() as trace:
        model(input_ids=ids, labels=ids)
    assert trace.counts == {"all_reduce": 9}
    assert trace.nbytes <= 282 * 1024


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_generate_with_the_states_of_this_ranks_heads(family):
    model, single = small(family)
    parallelize(model.eval(), ParallelDims(tp=2))
    ids = batch()["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), single.eval().generate(ids, **options))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
@in_float64()
def test_adapters_and_checkpointing(family):
    peft = pytest.importorskip("peft")
    model, single = small(family)
    targets = ["in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    for each in (model, single):
        torch.manual_seed(3)
        each = peft.get_peft_model(each, config).double()
        if each.get_base_model() is single:
            each(**batch()).loss.backward()
        else:
            parallelize(each, ParallelDims(tp=2), checkpointing="full")
            each(**batch()).loss.backward()
    check_gradients(model, single)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence", [False, True])
@in_float64()
def test_heads_that_ranks_do_not_divide_stay_whole(sequence):
    model, single = small("qwen3_5_text", linear_num_key_heads=2, linear_num_value_heads=2)
    with pytest.warns(UserWarning, match="are whole on every rank of tp"):
        parallelize(model, ParallelDims(tp=4), sequence_parallel=sequence)
    model(**batch()).loss.backward()
    single(**batch()).loss.backward()
    check_gradients(model, single)
