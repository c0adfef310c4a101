"""Parallel modules together with what a training or inference program does around them."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from tp_models import Block, Decoder, check_gradients, language_model, mesh, twins

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    NoParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel_tp.plans.decoders import llama3_plan

R, S1 = Replicate(), Shard(1)


def sequence_plan():
    split, join = ColwiseParallel(use_local_output=False), RowwiseParallel(output_layouts=S1, use_local_output=False)
    gather = PrepareModuleInput(input_layouts=(S1,), desired_input_layouts=(R,))
    return {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": gather,
        "attention.[qkv]": split,
        "attention.o": join,
        "mlp": gather,
        "mlp.gate": split,
        "mlp.up": split,
        "mlp.down": join,
    }


def decoder_plan():
    embed = RowwiseParallel(input_layouts=R, output_layouts=S1, use_local_output=False)
    head = ColwiseParallel(input_layouts=S1, output_layouts=R)
    return {"embed": embed, "layers.*": sequence_plan(), "norm": SequenceParallel(), "head": head}


IDS = [[1, 12, 3, 3, 0], [0, 9, 12, 5, 7]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model, twin = twins(Block)
    parallelize_module(model, mesh(), sequence_plan())
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given, y = distribute_tensor(x, mesh(), [S1]).requires_grad_(), x.clone().requires_grad_()
    out, want = checkpoint(model, given * 1, use_reentrant=reentrant), twin(y)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    torch.testing.assert_close(given.grad.full_tensor(), y.grad)
    check_gradients(model, twin)


@pytest.mark.ranks(2)
def test_micro_batches_add_up():
    model, twin = twins(Decoder)
    parallelize_module(model, mesh(), decoder_plan())
    for rows in IDS:
        model(torch.tensor([rows])).pow(2).sum().backward()
    twin(torch.tensor(IDS)).pow(2).sum().backward()
    check_gradients(model, twin)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model, twin = twins(Decoder)
    parallelize_module(model, mesh(), decoder_plan())
    with mode():
        for _ in range(2):
            torch.testing.assert_close(model(torch.tensor(IDS)), twin(torch.tensor(IDS)))


@pytest.mark.ranks(2)
def test_autocast():
    model, twin = twins(Decoder, dtype=torch.float32)
    parallelize_module(model, mesh(), decoder_plan())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, want = model(torch.tensor(IDS)), twin(torch.tensor(IDS))
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)
    out.float().pow(2).sum().backward()
    want.float().pow(2).sum().backward()
    for parameter, single in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad.full_tensor(), single.grad, rtol=0.1, atol=0.05 * single.grad.abs().max().item()
        )


@pytest.mark.ranks(2)
def test_a_model_in_bfloat16_reduces_in_bfloat16_and_stays_close():
    model, _ = twins(Decoder, dtype=torch.float32)
    twin = copy.deepcopy(model)
    parallelize_module(model.bfloat16(), mesh(), decoder_plan())
    out = model(torch.tensor(IDS))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), twin(torch.tensor(IDS)), rtol=0.1, atol=0.1)


@pytest.mark.ranks(2)
def test_the_mesh_of_the_with_block_is_the_default():
    model, twin = twins(Decoder)
    with mesh():
        parallelize_module(model, parallelize_plan=decoder_plan())
    torch.testing.assert_close(model(torch.tensor(IDS)), twin(torch.tensor(IDS)))


@pytest.mark.ranks(4)
def test_blocks_on_the_tensor_axis_of_a_batch_over_data_ranks():
    """A DTensor over (dp, tp): styles change its tp axis, leave the rows where they are, and hand out no piece."""
    full = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, twin = twins(Decoder)
    parallelize_module(model, full["tp"], {**decoder_plan(), "": NoParallel(use_local_output=False)})
    for name, parameter in list(model.named_parameters()):  # what fully_shard does
        owner, _, leaf = name.rpartition(".")
        whole = DTensor.from_local(parameter.to_local(), full, [R, *parameter.placements], shape=parameter.shape)
        model.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(whole)
    ids = distribute_tensor(torch.tensor(IDS), full, [Shard(0), R])
    out, want = model(ids), twin(torch.tensor(IDS))
    assert out.placements == (Shard(0), R)
    torch.testing.assert_close(out.full_tensor(), want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    check_gradients(model, twin)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_embedded_inputs_in_the_place_of_token_ids(sequence):
    pytest.importorskip("transformers")
    model = language_model("Llama")
    twin = copy.deepcopy(model)
    parallelize_module(model, mesh(), llama3_plan(sequence_parallel=sequence))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
    found, want = model(inputs_embeds=x).logits, twin(inputs_embeds=x).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_transformers_checkpointing_and_generation(sequence):
    pytest.importorskip("transformers")
    model = language_model("Llama")
    twin = copy.deepcopy(model)
    parallelize_module(model, mesh(), llama3_plan(sequence_parallel=sequence))
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    model.train().gradient_checkpointing_enable()
    loss, want = model(input_ids=ids, labels=ids).loss, twin(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, want)
    loss.backward()
    want.backward()
    for parameter, single in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), single.grad, rtol=1e-4, atol=1e-6)
    model.eval().gradient_checkpointing_disable()
    twin.eval()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    padded = {"attention_mask": mask, "pad_token_id": 0}
    ways = {"greedy": {"do_sample": False}, "sampling": {"do_sample": True, "top_k": 20}, "beams": {"num_beams": 2}}
    for way, settings in ways.items():
        results = []
        for one in (model, twin):
            torch.manual_seed(1)
            with implicit_replication() if way == "beams" else nullcontext():
                results.append(one.generate(ids, max_new_tokens=6, **padded, **settings).tolist())
        assert results[0] == results[1], way
