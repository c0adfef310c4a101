"""The plans of models with pictures, and of gpt_oss: gradients of one process, and what their layers communicate."""

import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # here and on the ranks

from tools.model_cells.zoo import MODELS, batch_of

from hyper_parallel import CommTrace, DTensor, ParallelDims, parallelize, shard_batch

SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sequence and loss"])


def pair(family):
    model = MODELS[family].build(experts="eager" if MODELS[family].experts else None)
    return model, copy.deepcopy(model)


def check_gradients(model, single, tolerance=1e-5):
    for (name, got), want in zip(model.named_parameters(), single.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            whole = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
            assert (whole - want.grad).norm() <= tolerance * want.grad.norm(), name


@pytest.mark.ranks(2)
@SHARDED
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_vl", "qwen3_5_moe_vl"])
def test_pictures(family, sharded):
    model, single = pair(family)
    parallelize(model, ParallelDims(tp=2), sequence_parallel=sharded, loss_parallel=sharded)
    batch = batch_of("images", 1)
    output, wanted = model(**batch), single(**batch)
    assert abs(output.loss.item() - wanted.loss.item()) <= 1e-6 * wanted.loss.item()
    output.loss.backward()
    wanted.loss.backward()
    check_gradients(model, single)
    tower = model.get_submodule("model.visual.blocks.0")
    assert {p.placements[0].is_shard() for p in (tower.attn.qkv.weight, tower.mlp.linear_fc1.weight)} == {True}


@pytest.mark.ranks(2)
@SHARDED
@pytest.mark.parametrize("kind", ["plain", "padding"])
def test_gpt_oss(kind, sharded):
    """Sinks, biases that are added once, and gate and up that alternate; its auxiliary loss is part of the loss."""
    model, single = pair("gpt_oss")
    parallelize(model, ParallelDims(tp=2), sequence_parallel=sharded, loss_parallel=sharded)
    batch = batch_of(kind, 1)
    with CommTrace() as trace:
        output = model(**batch)
        output.loss.backward()
    wanted = single(**batch)
    assert abs(output.loss.item() - wanted.loss.item()) <= 1e-6 * wanted.loss.item()
    wanted.loss.backward()
    check_gradients(model, single)
    blocks = 2 * model.config.num_hidden_layers + 1
    forward, backward = trace.phase("forward"), trace.phase("backward")
    if sharded:
        assert forward == {"all_gather": blocks, "reduce_scatter": blocks, "all_reduce": 2}
        assert (backward["all_gather"], backward["reduce_scatter"]) == (blocks, blocks)
    else:
        assert forward == {"all_reduce": blocks, "all_gather": 1}


@pytest.mark.ranks(4)
def test_gpt_oss_with_fewer_key_heads_than_ranks():
    model, single = pair("gpt_oss")
    parallelize(model, ParallelDims(tp=4))
    batch = batch_of("uneven", 1)
    model(**batch).loss.backward()
    single(**batch).loss.backward()
    check_gradients(model, single)


@pytest.mark.ranks(2)
def test_pictures_in_plain_batches_of_data_ranks():
    """Each rank gets the pictures of its rows, and the loss is over the labels of all, of which the first has fewer."""
    model, single = pair("qwen3_5_vl")
    dims = ParallelDims()
    parallelize(model, dims)
    batch = batch_of("images", 1)
    batch["labels"][0, 3:] = -100
    model(**shard_batch(batch, dims)).loss.backward()
    single(**batch).loss.backward()
    check_gradients(model, single)
