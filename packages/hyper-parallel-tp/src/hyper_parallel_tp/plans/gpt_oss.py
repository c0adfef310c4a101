"""The plan of gpt_oss: attention with sinks by heads, experts by features (gate and up alternate) or one by one."""

from __future__ import annotations

from typing import Any

from hyper_parallel import Partial, Placement, Replicate, Shard
from hyper_parallel_tp.parallel_dims import ParallelDims
from hyper_parallel_tp.plans.decoders import llama3_plan
from hyper_parallel_tp.styles.attention import AttentionParallel
from hyper_parallel_tp.styles.local_compute import LocalCompute
from hyper_parallel_tp.styles.prepare import PrepareModuleInputOutput
from hyper_parallel_tp.styles.sequence_parallel import NoParallel
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["gpt_oss_plan"]


def gpt_oss_plan(
    config: Any, dims: ParallelDims, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.GptOssForCausalLM``; arguments as of :func:`llama3_plan`.

    The router is whole. Of every expert's weights each rank has the same number of features; those of gate and up
    alternate, so neighbours stay together.

    Raises:
        ValueError: tp does not divide the features of an expert.
    """
    residual: Placement = Shard(1) if sequence_parallel else Replicate()
    plan = llama3_plan(config, dims, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    for projection in ("gate_proj", "up_proj", "down_proj"):
        del plan[f"model.layers.*.mlp.{projection}"]
    return {
        **plan,
        "model.layers.*.self_attn": AttentionParallel(
            per_head=("sinks",), input_layouts=residual, output_layouts=residual
        ),
        # The second output are scores of the router, which nobody reads.
        "model.layers.*.mlp": PrepareModuleInputOutput(
            input_layouts=residual,
            desired_input_layouts=Replicate(),
            output_layouts=residual,
            desired_output_layouts=residual,
            use_local_output=False,
        ),
        "model.layers.*.mlp.router": NoParallel(use_local_output=False),
        "model.layers.*.mlp.experts": _experts(config, dims),
    }


def _experts(config: Any, dims: ParallelDims) -> ParallelStyle:
    """Every expert by its features."""
    if config.intermediate_size % dims.tp:
        raise ValueError(
            f"gpt_oss_plan: tp={dims.tp} does not divide intermediate_size={config.intermediate_size}, the features "
            "of an expert, and gate and up alternate in one weight; use a tp that does, or ep"
        )
    return LocalCompute(
        parameters={
            "gate_up_proj": Shard(2),
            "gate_up_proj_bias": Shard(1),
            "down_proj": Shard(1),
            "down_proj_bias": Partial(),
        },
        output_layouts=Partial(),
    )
