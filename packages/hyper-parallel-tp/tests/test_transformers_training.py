"""Three training steps of transformers' models, their code unmodified, against one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import CommTrace, DTensor, init_device_mesh, parallelize_module
from hyper_parallel_tp.plans import llama3_plan, qwen3_plan

transformers = pytest.importorskip("transformers")

PLANS = {"Llama": llama3_plan, "Qwen3": qwen3_plan}
LENGTH = 11  # no number of ranks divides it


def build(family, **changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": torch.float32,
        **changes,
    }
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings)).train()


def batches(steps=3, rows=4):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        ids = torch.randint(0, 61, (rows, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, :2] = -100  # every row ignores as many, so that the mean over rows is that of the halves
        yield ids, labels


def train(model, mesh=None):
    """Losses of three steps; over a mesh with a data axis every data rank takes its rows and gradients are averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for ids, labels in batches():
        group, ranks, index = None, 1, 0
        if mesh is not None and mesh.ndim == 2:
            data = mesh[mesh.mesh_dim_names[0]]
            group, ranks, index = data.get_group(), data.size(), data.get_local_rank()
        mine = slice(index * len(ids) // ranks, (index + 1) * len(ids) // ranks)
        loss = model(input_ids=ids[mine], labels=labels[mine]).loss
        loss.backward()
        mean = torch.tensor(loss.item())
        if group is not None:
            if "dp" in mesh.mesh_dim_names:  # fully_shard does it by itself
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad.to_local(), group=group)
                    parameter.grad.to_local().div_(ranks)
            dist.all_reduce(mean, group=group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item() / ranks)
    return losses


def check_training(family, plan_options, shape, data="dp", **changes):
    names = (data, "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build(family, **changes)
    twin = copy.deepcopy(model)
    plan = None if plan_options is None else PLANS[family](**plan_options)
    parallelize_module(model, mesh["tp"] if len(shape) > 1 else mesh, plan)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == changes.get("tie_word_embeddings", False)
    if data == "fsdp":
        from hyper_parallel import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
        assert all(p.device_mesh.mesh_dim_names == ("fsdp", "tp") for p in model.parameters())
    found, want = train(model, mesh), train(twin)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    for (name, parameter), single in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.full_tensor(), single, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


OPTIONS = [{"sequence_parallel": s, "loss_parallel": p} for s in (False, True) for p in (False, True)]
NAMES = ["plain", "loss", "sequence", "sequence and loss"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", PLANS)
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_on_two_ranks(family, options, tied):
    check_training(family, options, (2,), tie_word_embeddings=tied)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", PLANS)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=["plain", "sequence and loss"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["tp=4", "dp=2 x tp=2"])
def test_on_four_ranks(family, options, shape):
    check_training(family, options, shape)  # with tp=4 there are fewer key-value heads than ranks


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", PLANS)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=["plain", "sequence and loss"])
@pytest.mark.parametrize("tied", [False, True])
def test_fully_sharded_over_tensor_parallel(family, options, tied):
    pytest.importorskip("hyper_parallel_fsdp")
    check_training(family, options, (2, 2), data="fsdp", tie_word_embeddings=tied)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", PLANS)
def test_without_a_plan_the_model_has_its_own(family):
    check_training(family, None, (2,), attn_implementation="eager")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_what_a_layer_costs(sequence):
    """The difference of a model with two layers and one with one, forward and backward."""
    counts = []
    for layers in (1, 2):
        model = build("Llama", num_hidden_layers=layers)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, llama3_plan(sequence_parallel=sequence, loss_parallel=True))
        ids, labels = next(batches())
        with CommTrace() as trace:
            model(input_ids=ids, labels=labels).loss.backward()
        counts.append((trace.phase("forward"), trace.phase("backward")))
    (small_forward, small_backward), (forward, backward) = counts
    if sequence:
        each_way = {"all_gather": 2, "reduce_scatter": 2}
        assert forward - small_forward == each_way
        assert backward - small_backward == {**each_way, "all_reduce": 2}  # and the gradients of two norms
    else:
        assert forward - small_forward == {"all_reduce": 2}
        assert backward - small_backward == {"all_reduce": 2}
