"""The plans of Qwen's models that look at pictures: their language models', and attention of the tower by heads."""

from __future__ import annotations

from typing import Any

from hyper_parallel import ParallelDims, ParallelStyle
from hyper_parallel_ops_qwen.plans.qwen3_5 import qwen3_5_moe_plan, qwen3_5_plan
from hyper_parallel_ops_qwen.plans.qwen3_moe import qwen3_moe_plan
from hyper_parallel_ops_qwen.plans.vision import with_pictures

__all__ = ["qwen3_5_moe_vl_plan", "qwen3_5_vl_plan", "qwen3_vl_moe_plan"]


def qwen3_vl_moe_plan(
    config: Any, dims: ParallelDims, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3VLMoeForConditionalGeneration``; arguments as of :func:`.qwen3_moe_plan`."""
    sharded = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    text = qwen3_moe_plan(config.text_config, dims, **sharded)
    return with_pictures(text, config, dims, adds_in_layers=True)


def qwen3_5_vl_plan(
    config: Any, dims: ParallelDims, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3_5ForConditionalGeneration``; arguments as of :func:`.qwen3_moe_plan`."""
    sharded = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    return with_pictures(qwen3_5_plan(config.text_config, dims, **sharded), config, dims)


def qwen3_5_moe_vl_plan(
    config: Any, dims: ParallelDims, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3_5MoeForConditionalGeneration``; arguments as of :func:`.qwen3_moe_plan`."""
    sharded = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    return with_pictures(qwen3_5_moe_plan(config.text_config, dims, **sharded), config, dims)
