"""One training step of each supported model, its code in ``transformers`` unmodified, equals that of one device."""

import copy

import pytest
from model_steps import STEPS, VARIANTS, check_step

from hyper_parallel import (
    DTensor,
    ShardingPlan,
    check_results,
    fully_shard,
    init_device_mesh,
    parallelize_module,
    shard_module,
)
from hyper_parallel.rules import replicate_rest


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("name", [*STEPS, *VARIANTS])
def test_a_training_step_equals_that_of_one_device(name):
    step = (STEPS | VARIANTS)[name]
    model = step.build()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model, mesh, ShardingPlan(plan=dict(step.plan)))
    check_step(step, model, twin, mesh)


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("name", [*STEPS, "qwen3_vl, images", "qwen3_vl_moe, images"])
def test_a_fully_sharded_model_with_its_own_plan_takes_a_batch_over_data_ranks(name):
    """``parallelize_module`` with the plan of ``transformers``, then ``fully_shard``."""
    step = (STEPS | VARIANTS)[name]
    model = step.build()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    parallelize_module(model, mesh["tp"])
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    check_step(step, model, twin, mesh)


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next", "qwen3_5", "deepseek_v3"])
def test_a_training_step_is_what_it_states_all_through(name):
    """In check mode, with every parameter, buffer and input a DTensor."""
    step = STEPS[name]
    model = step.build()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model, mesh, ShardingPlan(plan=dict(step.plan)))
    replicate_rest(model, mesh)
    assert all(isinstance(tensor, DTensor) for tensor in (*model.parameters(), *model.buffers()))
    with check_results():
        check_step(step, model, twin, mesh)
