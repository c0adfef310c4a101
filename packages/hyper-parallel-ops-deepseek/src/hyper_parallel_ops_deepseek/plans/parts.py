"""Parts that the plans of all DeepSeek models share: everything but attention."""

from __future__ import annotations

from typing import Any

from hyper_parallel import (
    ParallelDims,
    ParallelStyle,
    Placement,
    PositionwiseParallel,
    Replicate,
    Shard,
    decoder_ends,
    expert_mixture,
    experts_by_features,
)

__all__ = ["check_dropout", "mixture", "outside_of_layers", "per_position", "residual_of"]

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
    return decoder_ends(residual_of(sequence_parallel), per_position(sequence_parallel), loss_parallel=loss_parallel)


def mixture(name: str, config: Any, residual: Placement) -> Plan:
    """A mixture of experts with shared ones, each by features; the router is whole."""
    experts = experts_by_features(config.moe_intermediate_size)
    return expert_mixture(name, residual, experts, shared="shared_experts")
