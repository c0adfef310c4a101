"""``hyper-parallel coverage`` lists no missing function for the models that the packs are for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hyper_parallel.analysis.coverage import coverage_of, trace_training_step
from hyper_parallel.analysis.sample_models import SampleModel, sample_models
from hyper_parallel.registry import Registry

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.model_cells.zoo import MODELS, batch_of

TEXT = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl_moe",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "gpt_oss",
)
# The function by which a model's special part is recognised: a sample without that part would show nothing.
SPECIAL = {
    "qwen3_moe": "torch._grouped_mm",
    "qwen3_next": "torch.linalg.solve_triangular",
    "qwen3_5": "torch.conv1d",
    "qwen3_5_moe": "torch._grouped_mm",
    "qwen3_vl_moe": "torch.histc",
    "deepseek_v3": "torch._grouped_mm",
    "deepseek_v32": "torch._grouped_mm",
    "deepseek_v4": "torch.nn.functional.softplus",
    "gpt_oss": "torch._grouped_mm",
}


PICTURES = [name for name, model in MODELS.items() if model.images]


def check(sample):
    found = coverage_of(trace_training_step(sample), Registry())
    assert [f"{one.name}: {one.reason}" for one in found if one.status != "ok"] == []
    return {one.name for one in found}


@pytest.mark.parametrize("name", TEXT)
def test_every_function_of_a_training_step_has_a_rule(name):
    torch.manual_seed(0)
    assert SPECIAL.get(name, "torch.nn.functional.linear") in check(next(sample_models(name)))


@pytest.mark.parametrize("name", PICTURES)
def test_every_function_of_a_training_step_with_pictures_has_a_rule(name):
    assert "torch.nn.functional.layer_norm" in check(SampleModel(MODELS[name].build(), (), batch_of("images", 0)))
