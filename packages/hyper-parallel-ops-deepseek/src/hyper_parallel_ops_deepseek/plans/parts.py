"""Parts that the plans of all DeepSeek models share: everything but attention."""

from __future__ import annotations

from typing import Any

from hyper_parallel import (
    ColwiseParallel,
    LocalCompute,
    NoParallel,
    PackedShard,
    ParallelDims,
    ParallelStyle,
    Partial,
    Placement,
    PositionwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    Replicate,
    RowwiseParallel,
    Shard,
)

__all__ = ["check_dropout", "experts_style", "mixture", "mlp", "outside_of_layers", "per_position", "residual_of"]

Plan = dict[str, ParallelStyle]


def check_dropout(config: Any, dims: ParallelDims) -> None:
    """Refuse dropout of attention weights, where ranks would drop the same entries of their different heads.

    Raises:
        ValueError: there is some, and tp has several ranks.
    """
    if dims.tp > 1 and config.attention_dropout:
        raise ValueError(
            f"attention_dropout={config.attention_dropout} with tp={dims.tp}: attention runs on plain tensors of each "
            "rank's heads, and ranks would draw the same numbers for them; set config.attention_dropout = 0"
        )


def residual_of(sequence_parallel: bool) -> Placement:
    """How the hidden states between attention and mixture are laid out, ``[batch, sequence, features]``."""
    return Shard(1) if sequence_parallel else Replicate()


def per_position(sequence_parallel: bool) -> ParallelStyle:
    """The style of what looks at one position at a time: norms, and the mixing of residual streams."""
    return PositionwiseParallel(layout=residual_of(sequence_parallel))


def outside_of_layers(*, sequence_parallel: bool, loss_parallel: bool) -> Plan:
    """Embedding and head by vocabulary, and the last norm."""
    residual = residual_of(sequence_parallel)
    embedded = {"inputs_embeds": Replicate()}  # in the place of token ids
    return {
        "model": PrepareModuleInput(
            input_kwarg_layouts=embedded, desired_input_kwarg_layouts=dict.fromkeys(embedded, residual)
        ),
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=residual, use_local_output=False
        ),
        "model.norm": per_position(sequence_parallel),
        "lm_head": ColwiseParallel(
            input_layouts=residual,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }


def mlp(name: str, output: Placement) -> Plan:
    """A gated MLP by features, whose input is whole."""
    split = ColwiseParallel(use_local_output=False)
    return {
        f"{name}.gate_proj": split,
        f"{name}.up_proj": split,
        f"{name}.down_proj": RowwiseParallel(output_layouts=output, use_local_output=False),
    }


def mixture(name: str, config: Any, dims: ParallelDims, residual: Placement) -> Plan:
    """A mixture of experts with shared ones, each by features; the router is whole.

    Both give terms of one sum, so that the layer costs one collective each way.
    """
    return {
        name: PrepareModuleInputOutput(
            input_layouts=residual,
            desired_input_layouts=Replicate(),
            output_layouts=Partial(),
            desired_output_layouts=residual,
            use_local_output=False,
        ),
        f"{name}.gate": NoParallel(use_local_output=False),
        f"{name}.experts": experts_style(config, dims),
        **mlp(f"{name}.shared_experts", Partial()),
    }


def experts_style(config: Any, dims: ParallelDims) -> ParallelStyle:
    """Every expert by its features; gate and up are packed in one weight ``[experts, 2 * features, hidden]``."""
    features = config.moe_intermediate_size
    return LocalCompute(
        parameters={"gate_up_proj": PackedShard(1, (features, features)), "down_proj": Shard(2)},
        output_layouts=Partial(),
    )
