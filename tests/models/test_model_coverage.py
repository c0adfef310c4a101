"""``hyper-parallel coverage`` lists no missing function for the models that the packs are for."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.analysis.coverage import coverage_of, trace_training_step
from hyper_parallel.analysis.sample_models import sample_models
from hyper_parallel.registry import Registry

MODELS = (
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
}


def small_vision_model():
    """Qwen3-VL with an image in the batch."""
    import transformers

    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        "qwen3_vl_moe", text_config=text, vision_config=vision,
        image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip
    model = transformers.AutoModelForImageTextToText.from_config(config)
    tokens = torch.randint(1, 60, (1, 12))
    tokens[0, 2], tokens[0, 3:7], tokens[0, 7] = 62, 60, 63  # an image of 4 merged patches
    image = {"pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    types = (tokens == 60).int()
    return model, {"input_ids": tokens, "labels": tokens.clone(), "mm_token_type_ids": types, **image}


@pytest.mark.parametrize("name", [*MODELS, "image"])
def test_every_function_of_a_training_step_has_a_rule(name):
    torch.manual_seed(0)
    samples = sample_models(name if name != "image" else f"{__name__}:small_vision_model")
    found = coverage_of(trace_training_step(next(samples)), Registry())
    assert [f"{one.name}: {one.reason}" for one in found if one.status != "ok"] == []
    assert SPECIAL.get(name, "torch.nn.functional.linear") in {one.name for one in found}
