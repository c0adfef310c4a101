"""Training steps with ``attn_implementation="flash_attention_2"``, the models' code unmodified, equal one device.

The batch is sharded over dp and the heads over tp, as in test_model_steps. With a padding mask, and with sequences
packed into one by position ids, the models call the kernel with the tokens of all sequences in one dim.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from flash_path import flash_path
from model_steps import STEPS, Step, check_step
from transformers import modeling_flash_attention_utils

from hyper_parallel import ShardingPlan, init_device_mesh, shard_module


class Packed(Step):
    """The sequences of a batch one after the other."""

    def inputs(self) -> dict[str, torch.Tensor]:
        found = super().inputs()
        lengths = found["input_ids"].shape
        return {
            **{key: value.view(1, -1) for key, value in found.items()},
            "position_ids": torch.arange(lengths[1]).repeat(1, lengths[0]),
        }


def form_of(name: str, form: str) -> Step:
    step = STEPS[name]
    return Packed(**vars(step)) if form == "packed" else replace(step, padded=form == "padded")


# DeepSeek-V3.2 has no flash attention. With a padding mask V4's compressed keys are more than the mask has room for, on
# one device too.
CASES = [
    *(("npu", name, "plain") for name in STEPS if name != "deepseek_v32"),
    ("npu", "qwen3", "padded"),
    ("npu", "qwen3_5", "padded"),
    ("npu", "qwen3_moe", "packed"),
    ("cuda", "llama", "plain"),
    ("cuda", "qwen3_moe", "plain"),
    ("cuda", "qwen3", "padded"),
    ("cuda", "deepseek_v3", "padded"),
    ("cuda", "qwen3_5_moe", "packed"),
]


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize(("kernels", "name", "form"), CASES, ids=map("-".join, CASES))
def test_a_training_step_equals_that_of_one_device(kernels, name, form):
    step = form_of(name, form)
    model = step.build()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model, mesh, ShardingPlan(plan=dict(step.plan)))
    with flash_path(kernels, model, twin):
        check_step(step, model, twin, mesh)
        assert modeling_flash_attention_utils._loaded_implementation == "flash_attention_2"
