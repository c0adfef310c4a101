"""Plans for decoders of ``transformers``, better than the ones that the models carry.

They add sequence parallel (norms, dropout and the residual stream work on a part of the sequence; gather and scatter
in place of all-reduce, so the activations between blocks take a fraction of the memory) and loss parallel (the logits
stay split by vocabulary, and no rank ever holds them whole).
"""

from __future__ import annotations

from typing import Any

from hyper_parallel import Placement, Replicate, Shard
from hyper_parallel_tp.parallel_dims import ParallelDims
from hyper_parallel_tp.plans.parts import decoder_ends, gated_mlp
from hyper_parallel_tp.styles.attention import AttentionParallel
from hyper_parallel_tp.styles.sequence_parallel import NoParallel, SequenceParallel
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["llama3_plan", "qwen3_plan", "qwen3_vl_plan"]


def llama3_plan(
    config: Any = None,
    dims: ParallelDims | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.LlamaForCausalLM``.

    Args:
        config, dims: what every plan is given; this one is the same for all.
        sequence_parallel: split the sequence outside of attention and MLP; any length, also one that the ranks do not
            divide.
        loss_parallel: leave the logits split by vocabulary (``Shard(-1)``); the model's own loss, and any
            ``cross_entropy`` on them, then works on the pieces. Otherwise logits and loss are plain tensors.
    """
    residual: Placement = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else NoParallel(use_local_output=False)
    return {
        **decoder_ends(residual, norm, loss_parallel=loss_parallel),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": AttentionParallel(input_layouts=residual, output_layouts=residual),
        "model.layers.*.post_attention_layernorm": norm,
        **gated_mlp("model.layers.*.mlp", residual, input=residual),
    }


def qwen3_plan(
    config: Any = None,
    dims: ParallelDims | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3ForCausalLM``; arguments as in :func:`llama3_plan`.

    The names are Llama's; the norms of single heads (``q_norm``, ``k_norm``) are the attention style's affair.
    """
    return llama3_plan(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)


def qwen3_vl_plan(
    config: Any = None,
    dims: ParallelDims | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> dict[str, ParallelStyle]:
    """The plan of ``transformers.Qwen3VLForConditionalGeneration``: that of :func:`qwen3_plan` for its language model.

    What looks at the pictures is held whole by every rank.
    """
    plan = qwen3_plan(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    inside = {name: style for name, style in plan.items() if name.partition(".")[0] == "model"}
    outside = {name: style for name, style in plan.items() if name not in inside}
    seeing = {"model.visual": NoParallel(use_local_output=False)}
    return {**{f"model.language_{name}": style for name, style in inside.items()}, **seeing, **outside}
