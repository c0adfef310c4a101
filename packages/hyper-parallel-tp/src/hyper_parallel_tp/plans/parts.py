"""Parts that plans of decoders are made of, in any package: each gives names of modules with their styles."""

from __future__ import annotations

from hyper_parallel import PackedShard, Partial, Placement, Replicate, Shard
from hyper_parallel_tp.styles.colwise_rowwise import ColwiseParallel, RowwiseParallel
from hyper_parallel_tp.styles.local_compute import LocalCompute
from hyper_parallel_tp.styles.prepare import PrepareModuleInput, PrepareModuleInputOutput
from hyper_parallel_tp.styles.sequence_parallel import NoParallel
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["decoder_ends", "expert_mixture", "experts_by_features", "gated_mlp"]

Plan = dict[str, ParallelStyle]


def decoder_ends(residual: Placement, norm: ParallelStyle, *, loss_parallel: bool) -> Plan:
    """What is before and after the layers: embedding and head by vocabulary, and the last norm.

    Args:
        residual: of the hidden states between layers, ``[batch, sequence, features]``: ``Shard(1)`` or Replicate.
        norm: style of the last norm.
        loss_parallel: leave the logits ``Shard(-1)``, a DTensor; otherwise they are gathered and plain.
    """
    embedded = {"inputs_embeds": Replicate()}  # in the place of token ids
    return {
        "model": PrepareModuleInput(
            input_kwarg_layouts=embedded, desired_input_kwarg_layouts=dict.fromkeys(embedded, residual)
        ),
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=residual, use_local_output=False
        ),
        "model.norm": norm,
        "lm_head": ColwiseParallel(
            input_layouts=residual,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }


def gated_mlp(name: str, output: Placement, *, input: Placement | None = None) -> Plan:
    """An MLP with ``gate_proj``, ``up_proj`` and ``down_proj``, by features.

    Args:
        name: of the module.
        output: what its result becomes.
        input: of its input, which is gathered once; None where it is whole already.
    """
    split = ColwiseParallel(use_local_output=False)
    entered = (
        {} if input is None else {name: PrepareModuleInput(input_layouts=input, desired_input_layouts=Replicate())}
    )
    return {
        **entered,
        f"{name}.gate_proj": split,
        f"{name}.up_proj": split,
        f"{name}.down_proj": RowwiseParallel(output_layouts=output, use_local_output=False),
    }


def expert_mixture(name: str, residual: Placement, experts: ParallelStyle, *, shared: str | None = None) -> Plan:
    """A block with a router ``gate``, which is whole, and ``experts``; perhaps with an MLP that all tokens go through.

    What experts and the shared one compute are terms of one sum, so that the block costs one collective each way.

    Args:
        name: of the block.
        residual: of its input and its output.
        experts: their style, such as :func:`experts_by_features`.
        shared: name of the shared MLP in the block.
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
        f"{name}.experts": experts,
        **({} if shared is None else gated_mlp(f"{name}.{shared}", Partial())),
    }


def experts_by_features(features: int) -> ParallelStyle:
    """Every expert of a layer by its ``features``; gate and up are one weight, ``[experts, 2 * features, hidden]``."""
    return LocalCompute(
        parameters={"gate_up_proj": PackedShard(1, (features, features)), "down_proj": Shard(2)},
        output_layouts=Partial(),
    )
