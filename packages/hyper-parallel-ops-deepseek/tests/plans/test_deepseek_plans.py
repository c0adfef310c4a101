"""DeepSeek models in one call, against the same models on one process: gradients, collectives and their bytes."""

from itertools import chain

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("hyper_parallel_tp")

from deepseek_models import SIZES, VOCABULARY, batch, check_gradients, model_of

from hyper_parallel import CommTrace, DTensor, ParallelDims, Replicate, parallelize, parallelize_module, shard_batch

WHOLE = {"sequence_parallel": False, "loss_parallel": False}
MODES = {"whole": WHOLE, "sequence and loss": {}}
LENGTH, HIDDEN, BYTES = 11, 32, 4

# Features per position: what attention makes of its input, and what of it only says where to look.
LATENTS = {
    "deepseek_v3": [16 + 10 + 4] * 2,
    "deepseek_v32": [16 + 10 + 4] * 2,
    "deepseek_v4": [16 + 8, 16 + 8 + 2 * 8, 16 + 8 + 4 * 8],  # a window; with compressed keys; with those of two kinds
}
CHOOSING = {"deepseek_v3": [0, 0], "deepseek_v32": [8 + 2] * 2, "deepseek_v4": [0, 0, 2 * 16 + 2]}


def step(family, tp, options, **changes):
    """A step of both models, compared; the parallel one, and what it sent."""
    checkpointing = changes.pop("checkpointing", "none")
    single, model = model_of(family, **changes), model_of(family, **changes)
    wanted = single(**batch(LENGTH))
    wanted.loss.backward()
    parallelize(model, ParallelDims(tp=tp), checkpointing=checkpointing, **options)
    with CommTrace() as trace:
        output = model(**batch(LENGTH))
        output.loss.backward()
    assert isinstance(output.logits, DTensor) == (options is not WHOLE)
    assert abs(output.loss.item() - wanted.loss.item()) < 1e-6
    check_gradients(model, single)
    return model, trace


def sent(trace, phase):
    """Collectives of activations: all but those of the loss, and of gradients of parameters that are whole."""
    return [
        (e.op, e.nbytes) for e in trace.events if e.phase == phase and "loss_utils" not in e.where and not is_sum(e)
    ]


def is_sum(event):
    """Whether it is a sum of gradients of parameters: those of a layer, or of a norm, or of a router."""
    sizes = (HIDDEN * BYTES, 4 * HIDDEN * BYTES)  # of no activation
    return event.phase == "backward" and (event.change.startswith("gradients of") or event.nbytes in sizes)


def bytes_of_sums(model):
    """What is sent for each layer's whole parameters that have a gradient: all of them, and a number for each."""
    numels = [[p.grad.numel() for p in layer.parameters() if is_whole(p)] for layer in model.model.layers]
    return [BYTES * (sum(each) + len(each)) for each in reversed(numels)]


def is_whole(parameter):
    return parameter.grad is not None and parameter.placements == (Replicate(),)


def check_whole(family, trace):
    """One all-reduce each way for attention and for the MLP; that of attention's gradient is of latents only."""
    size = 2 * LENGTH * BYTES
    hidden, layers = ("all_reduce", size * HIDDEN), len(LATENTS[family])
    assert sent(trace, "forward") == [hidden] * (1 + 2 * layers) + [("all_gather", sent(trace, "forward")[-1][1])]
    back = [[hidden, ("all_reduce", size * latents)] for latents in reversed(LATENTS[family])]
    assert sent(trace, "backward") == [hidden, *chain(*back)]
    if family != "deepseek_v4":  # whose compressors are whole too
        assert [e.nbytes for e in trace.events if is_sum(e)] == [4 * HIDDEN * BYTES]  # of the router, and of no other


def check_sequence_parallel(family, model, trace, tp):
    """One gather and one scatter each way for attention and for the MLP. Attention gathers latents, in one buffer, and
    the gradient of those that have one comes back. What is whole in a layer is summed together."""
    size = 2 * -(-LENGTH // tp) * tp * BYTES  # shards are as long as the longest one
    gather, scatter = ("all_gather", size * HIDDEN), ("reduce_scatter", size * HIDDEN)
    ahead = [
        [("all_gather", size * (latents + choosing)), scatter, gather, scatter]
        for latents, choosing in zip(LATENTS[family], CHOOSING[family], strict=True)
    ]
    back = [[gather, scatter, gather, ("reduce_scatter", size * latents)] for latents in reversed(LATENTS[family])]
    assert sent(trace, "forward") == [scatter, *chain(*ahead), gather]
    assert sent(trace, "backward") == [scatter, *chain(*back), gather]
    sums = [e.nbytes for e in trace.events if is_sum(e)]
    streams = [BYTES * (4 * 4 * HIDDEN + 4 + 1 + 3)] if family == "deepseek_v4" else []  # joined at the end
    assert sums == [HIDDEN * BYTES, *streams, *bytes_of_sums(model)]


def check_step(family, mode, tp):
    model, trace = step(family, tp, MODES[mode])
    if mode == "whole":
        check_whole(family, trace)
    else:
        check_sequence_parallel(family, model, trace, tp)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_on_two_ranks(family, mode):
    check_step(family, mode, 2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_on_four_ranks(family, mode):
    check_step(family, mode, 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activation_checkpointing(family, checkpointing):
    step(family, 2, {}, checkpointing=checkpointing, tie_word_embeddings=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes",
    [{"q_lora_rank": None}, {"attention_bias": True, "rope_interleave": False}, {"first_k_dense_replace": 0}],
    ids=str,
)
def test_other_forms_of_deepseek_v3(mode, changes):
    step("deepseek_v3", 2, MODES[mode], **changes)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_generate_with_a_cache(family, mode):
    single, model = model_of(family).eval(), model_of(family)
    parallelize(model, ParallelDims(tp=2), **MODES[mode]).eval()
    ids = batch()["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), single.generate(ids, **options))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", SIZES)
def test_adapters_on_projections(family):
    peft = pytest.importorskip("peft")
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "kv_proj", "o_b_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(peft.get_peft_model(model_of(family), config))
    single, model = models
    parallelize(model, ParallelDims(tp=2))
    for each in models:
        each(**batch()).loss.backward()
    check_gradients(model, single)
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", SIZES)
def test_parallelize_module_takes_the_plan(family):
    single, model = model_of(family), model_of(family)
    parallelize_module(model, ParallelDims(tp=2).get_mesh("tp"))
    for each in (single, model):
        output = each(**batch())
        output.loss.backward()
    assert type(output.logits) is torch.Tensor
    assert output.logits.shape == (2, LENGTH, VOCABULARY)
    check_gradients(model, single)


@pytest.mark.ranks(4)
def test_the_loss_of_the_router():
    """Its logits are whole on every rank, and so is the gradient that this loss gives them."""
    step("deepseek_v4", 4, {}, output_router_logits=True, router_aux_loss_coef=0.5)


@pytest.mark.ranks(4)
def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"set config\.attention_dropout = 0"):
        parallelize(model_of("deepseek_v4", attention_dropout=0.1), ParallelDims(tp=4))
    with pytest.raises(ValueError, match="4 ranks do not divide num_heads=6"):
        parallelize(model_of("deepseek_v3", num_attention_heads=6, num_key_value_heads=6), ParallelDims(tp=4))
    with pytest.raises(ValueError, match=r"4 ranks do not divide config\.o_groups=2"):
        parallelize(model_of("deepseek_v4", o_groups=2), ParallelDims(tp=4))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("as_dtensor", [False, True])
@pytest.mark.parametrize("data", ["dp_shard", "dp_replicate"])
def test_with_data_ranks(family, as_dtensor, data):
    """One of them has more labels than the other."""
    pytest.importorskip("hyper_parallel_fsdp")
    single, model = model_of(family), model_of(family)
    dims = ParallelDims(tp=2, **{data: 2})
    parallelize(model, dims)
    single(**batch()).loss.backward()
    model(**shard_batch(batch(), dims, as_dtensor=as_dtensor)).loss.backward()
    check_gradients(model, single)
