"""Models whose parameters were made DTensors by hand train as on one device: no plan, no hooks on modules.

The models are those of test_model_steps, their code in ``transformers`` unmodified, in every form of attention, experts
and batch.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from model_steps import DELTA_SIZES, EXPERTS, SIZES, SPECIAL_TOKENS, STEPS, VISION, Step, check_step, variant

from hyper_parallel import (
    DeviceMesh,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)

R = Replicate()
DELTA_TEXT = SIZES | DELTA_SIZES
DELTA_VISION = {key: value for key, value in VISION.items() if key != "deepstack_visual_indexes"}
MODELS = {name: step for name, step in STEPS.items() if name != "qwen3_vl_moe"} | {
    "qwen3_vl_moe, images": variant("qwen3_vl_moe", sizes=SPECIAL_TOKENS, images=True),
    "qwen3_5, images": Step(
        "qwen3_5", SPECIAL_TOKENS | {"vision_config": DELTA_VISION, "text_config": DELTA_TEXT}, images=True
    ),
    "qwen3_5_moe, images": Step(
        "qwen3_5_moe",
        SPECIAL_TOKENS | {"vision_config": DELTA_VISION, "text_config": DELTA_TEXT | EXPERTS},
        images=True,
    ),
}
# Attention, experts and batch: each form of each.
FORMS = (
    ("eager", "grouped_mm", "plain"),
    ("eager", "eager", "left padded"),
    ("sdpa", "grouped_mm", "packed"),
    ("sdpa", "batched_mm", "right padded"),
)


def whole(parameter: torch.nn.Parameter) -> Placement:
    return R


def rows_where_even(parameter: torch.nn.Parameter) -> Placement:
    return Shard(0) if parameter.ndim and parameter.shape[0] % 2 == 0 else R


# Placement of a parameter, and of the batch: None is a plain batch, and plain buffers.
HOW = {
    "parameters only": (whole, None),
    "all replicated": (whole, R),
    "rows of parameters": (rows_where_even, R),
    "batch": (whole, Shard(0)),
}


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_equals_that_of_one_device(name, how):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    of_parameter, of_batch = HOW[how]
    for attention, experts, form in FORMS:
        step = replace(MODELS[name], attention=attention, experts=experts, policy="auto")
        model = step.build()
        twin = copy.deepcopy(model)
        for module in model.modules():
            for key, value in module._parameters.items():
                if value is not None:
                    module._parameters[key] = torch.nn.Parameter(spread(value.detach(), mesh, of_parameter(value)))
            for key, value in module._buffers.items():
                if value is not None and of_batch is not None:
                    module._buffers[key] = spread(value, mesh, R)
        placements = None if of_batch is None else (of_batch,)
        with implicit_replication():
            check_step(step, model, twin, mesh, in_form(step.inputs(), form), placements)


def spread(value: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    return distribute_tensor(value, mesh, [placement], src_data_rank=None)


def in_form(inputs: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """The batch with a mask of padding, or of two sequences in each row; tokens of images are never masked."""
    tokens = inputs["input_ids"]
    if form == "packed":
        rows = torch.cat((torch.arange(7), torch.arange(tokens.shape[1] - 7)))
        return inputs | {"position_ids": rows.expand_as(tokens).contiguous()}
    if form == "plain":
        return inputs
    mask = torch.ones_like(tokens)
    if form == "left padded":
        mask[2, :2] = mask[3, :3] = 0
    else:
        mask[0, 10:] = mask[1, 8:] = 0
    return inputs | {"attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}
