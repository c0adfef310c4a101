"""LoRA adapters of peft over parallel layers: loss and every adapter's gradient are those of one device."""

from __future__ import annotations

import copy

import pytest
import torch
from tp_models import language_model

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    implicit_replication,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel_tp.plans.decoders import llama3_plan

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]


def with_adapters(model, layers=LAYERS, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=layers, init_lora_weights=False, **options))


def check(model, twin, adapters):
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(3))
    loss, want = model(input_ids=ids, labels=ids).loss, twin(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss.full_tensor() if isinstance(loss, DTensor) else loss, want)
    loss.backward()
    want.backward()
    trained = 0
    for (name, parameter), single in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert parameter.requires_grad == single.requires_grad
        assert (parameter.grad is None) == (single.grad is None), name
        if single.grad is not None:
            trained += 1
            found = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
            torch.testing.assert_close(found, single.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert trained == adapters


@pytest.mark.ranks(2)
@pytest.mark.parametrize("both", [False, True], ids=["tensor parallel", "with sequence and loss"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_before_parallelising(both, dora):
    """The way that works for every plan: a style splits a layer's adapters as it splits the layer."""
    model = language_model("Llama")
    twin = with_adapters(copy.deepcopy(model), use_dora=dora)
    adapted = with_adapters(model, use_dora=dora)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, llama3_plan(sequence_parallel=both, loss_parallel=both))
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.lora_B.default.weight.placements == (Shard(0),)
    assert attention.q_proj.lora_A.default.weight.placements == (Replicate(),)
    assert attention.o_proj.lora_A.default.weight.placements == (Shard(1),)
    check(adapted, twin, 48 if dora else 32)


@pytest.mark.ranks(2)
def test_the_wrapped_model_has_the_plan_of_what_is_inside():
    model = language_model("Llama")
    twin = with_adapters(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    adapted = parallelize_module(with_adapters(model), mesh)
    assert isinstance(adapted, peft.PeftModel)
    check(adapted, twin, 32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("both", [False, True], ids=["tensor parallel", "with sequence and loss"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_after_parallelising(both, dora):
    """They stay plain: every rank holds them whole. DoRA's magnitudes come from weights and adapters together."""
    # A split head gathers the sequence for itself, not for an adapter that nobody declared.
    layers = LAYERS[:-1] if both else LAYERS
    model = language_model("Llama")
    twin = with_adapters(copy.deepcopy(model), layers, use_dora=dora)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, llama3_plan(sequence_parallel=both, loss_parallel=both))
    with implicit_replication():
        adapted = with_adapters(model, layers, use_dora=dora)
    check(adapted, twin, sum(p.requires_grad for p in twin.parameters()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layer", ["lm_head", "q_proj", "o_proj"])
def test_late_adapters_where_they_cannot_work_are_named(layer):
    """A head that gathers a piece of the sequence; projections that hand out plain pieces."""
    model = language_model("Llama")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    pieces = {
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    }
    head = llama3_plan(sequence_parallel=True, loss_parallel=True)
    parallelize_module(model, mesh, head if layer == "lm_head" else pieces)
    with implicit_replication():
        adapted = with_adapters(model, [layer])
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(3))
    with pytest.raises(ValueError, match=rf"{layer}: its adapters were added after .* Add them first: model ="):
        adapted(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="exactly one of input_ids"):  # what has another cause stays as it is
        adapted()


@pytest.mark.ranks(2)
def test_memory_that_runs_out_in_late_adapters_is_no_fault_of_theirs():
    model = language_model("Llama")
    parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), llama3_plan())
    with implicit_replication():
        adapted = with_adapters(model, ["q_proj"])

    def run_out(module, inputs):
        raise torch.OutOfMemoryError("out of memory")

    adapters = [m for name, m in adapted.named_modules() if name.endswith("q_proj.lora_A.default")]
    adapters[0].register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        adapted(input_ids=torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.ranks(2)
def test_modules_to_save_under_the_models_own_plan():
    """Refused with two ways out, and both work."""
    model = language_model("Llama")
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    adapted = with_adapters(copy.deepcopy(plain), ["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(TypeError, match=r"(?s)got ModulesToSaveWrapper; .*target_modules instead; .*original_module"):
        parallelize_module(adapted, mesh)

    adapted = with_adapters(copy.deepcopy(plain), ["q_proj", "lm_head"])
    parallelize_module(adapted, mesh)
    check(adapted, with_adapters(copy.deepcopy(plain), ["q_proj", "lm_head"]), 2 * (1 + plain.config.num_hidden_layers))

    adapted, twin = (with_adapters(copy.deepcopy(plain), ["q_proj"], modules_to_save=["lm_head"]) for _ in range(2))
    head = ColwiseParallel(output_layouts=Replicate())
    names = ("original_module", "modules_to_save.default")
    parallelize_module(adapted, mesh, {f"base_model.model.lm_head.{name}": head for name in names})
    check(adapted, twin, 2 * plain.config.num_hidden_layers + 1)
