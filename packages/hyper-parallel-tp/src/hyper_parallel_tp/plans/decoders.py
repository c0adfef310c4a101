"""Plans for decoders of ``transformers``, better than the ones that the models carry.

They add sequence parallel (norms, dropout and the residual stream work on a part of the sequence; gather and scatter
in place of all-reduce, so the activations between blocks take a fraction of the memory) and loss parallel (the logits
stay split by vocabulary, and no rank ever holds them whole).
"""

from __future__ import annotations

from typing import Any

from hyper_parallel import Placement, Replicate, Shard
from hyper_parallel_tp.parallel_dims import ParallelDims
from hyper_parallel_tp.styles.attention import AttentionParallel
from hyper_parallel_tp.styles.colwise_rowwise import ColwiseParallel, RowwiseParallel
from hyper_parallel_tp.styles.prepare import PrepareModuleInput
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
    split = ColwiseParallel(use_local_output=False)
    join = RowwiseParallel(output_layouts=residual, use_local_output=False)
    embedded = {"inputs_embeds": Replicate()}  # in the place of token ids
    return {
        "model": PrepareModuleInput(
            input_kwarg_layouts=embedded, desired_input_kwarg_layouts=dict.fromkeys(embedded, residual)
        ),
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=residual, use_local_output=False
        ),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": AttentionParallel(input_layouts=residual, output_layouts=residual),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=residual, desired_input_layouts=Replicate()),
        "model.layers.*.mlp.gate_proj": split,
        "model.layers.*.mlp.up_proj": split,
        "model.layers.*.mlp.down_proj": join,
        "model.norm": norm,
        "lm_head": ColwiseParallel(
            input_layouts=residual,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
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
