"""Three training steps of transformers' models, their code unmodified, against one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tp_models import language_model

from hyper_parallel import CommTrace, DTensor, ParallelDims, init_device_mesh, parallelize_module
from hyper_parallel_tp.plans.decoders import llama3_plan, qwen3_plan

pytest.importorskip("transformers")

PLANS = {"Llama": llama3_plan, "Qwen3": qwen3_plan}
LENGTH = 11  # no number of ranks divides it


def batches(steps=3, rows=4):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        ids = torch.randint(0, 61, (rows, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, :2] = -100  # every row ignores as many, so that the mean over rows is that of the halves
        yield ids, labels


def train(model, data=None, average=False):
    """Losses of three steps. Every rank of the data mesh takes its rows; ``average`` averages the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    ranks, index = (1, 0) if data is None else (data.size(), data.get_local_rank())
    losses = []
    for ids, labels in batches():
        mine = slice(index * len(ids) // ranks, (index + 1) * len(ids) // ranks)
        loss = model(input_ids=ids[mine], labels=labels[mine]).loss
        loss.backward()
        if average:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.to_local(), group=data.get_group())
                parameter.grad.to_local().div_(ranks)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(loss.item())
        if data is not None:
            dist.all_reduce(mean, group=data.get_group())
        losses.append(mean.item() / ranks)
    return losses


def check_training(family, plan_options, dims, fsdp=False, **changes):
    model = language_model(family, **changes)
    twin = copy.deepcopy(model)
    plan = None if plan_options is None else PLANS[family](**plan_options)
    parallelize_module(model, dims.get_mesh("tp"), plan)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == changes.get("tie_word_embeddings", False)
    if fsdp:
        from hyper_parallel import fully_shard

        over = dims.get_mesh(("dp_replicate", "fsdp") if dims.dp_replicate > 1 else "fsdp")
        for layer in model.model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        assert all("fsdp" in p.device_mesh.mesh_dim_names for p in model.parameters())
    found, want = (
        train(model, dims.get_mesh("batch" if dims.dp_replicate > 1 else "fsdp"), average=not fsdp),
        train(twin),
    )
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
    check_training(family, options, ParallelDims(tp=2), tie_word_embeddings=tied)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", PLANS)
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("tp", [4, 2], ids=["tp=4", "dp=2 x tp=2"])
@pytest.mark.parametrize("tied", [False, True])
def test_on_four_ranks(family, options, tp, tied):
    # with tp=4 there are fewer key-value heads than ranks
    check_training(family, options, ParallelDims(tp=tp), tie_word_embeddings=tied)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", PLANS)
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_fully_sharded_over_tensor_parallel(family, options, tied):
    pytest.importorskip("hyper_parallel_fsdp")
    check_training(family, options, ParallelDims(tp=2), fsdp=True, tie_word_embeddings=tied)


@pytest.mark.ranks(8)
def test_three_axes():
    pytest.importorskip("hyper_parallel_fsdp")
    check_training("Qwen3", OPTIONS[3], ParallelDims(dp_replicate=2, tp=2), fsdp=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", PLANS)
def test_without_a_plan_the_model_has_its_own(family):
    check_training(family, None, ParallelDims(tp=2), attn_implementation="eager")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_what_a_layer_costs(sequence):
    """The difference of a model with two layers and one with one, forward and backward."""
    counts = []
    for layers in (1, 2):
        model = language_model("Llama", num_hidden_layers=layers)
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
