"""``parallelize``: a whole model over all axes of :class:`ParallelDims`, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hyper_parallel.rules import replaces_parameters
from hyper_parallel_tp.models.activation_checkpointing import checkpoint_blocks
from hyper_parallel_tp.models.block_gradients import join_gradients_of_blocks
from hyper_parallel_tp.models.blocks import blocks_of, inside_adapters
from hyper_parallel_tp.models.chosen_plan import choose_plan
from hyper_parallel_tp.models.data_parallel import shard_over_data
from hyper_parallel_tp.models.generation import adapt_generate
from hyper_parallel_tp.models.record import Parallelized, check_what_is_whole, note_parallelized
from hyper_parallel_tp.models.root_call import adapt_root_call
from hyper_parallel_tp.models.shared_values import share_values
from hyper_parallel_tp.parallel_dims import ParallelDims
from hyper_parallel_tp.parallelize import apply_plan
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    *,
    plan: Mapping[str, ParallelStyle] | None = None,
    sequence_parallel: bool | None = None,
    loss_parallel: bool | None = None,
    checkpointing: str = "none",
    mp_policy: Any = None,
    offload_policy: Any = None,
    compile: bool = False,
) -> nn.Module:
    """Parallelise a whole model, in place: layers over tp, parameters over the data axes.

    ::

        dims = ParallelDims(dp_shard=2, tp=4)
        model = parallelize(AutoModelForCausalLM.from_pretrained(folder), dims)
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(**shard_batch(batch, dims)).loss

    The model may be on the meta device, or on this rank's; the values of rank 0 count. Afterwards each data rank calls
    it with its own part of the batch (plain tensors, or DTensors over the data axes); ranks that differ in tp only pass
    the same part. In training a model of ``transformers`` keeps no cache unless it is asked to, and its loss is the
    mean over the tokens of all data ranks, however they are spread. ``generate()`` works as before: all ranks call it.

    What was done is told by :func:`parallel_report`.

    Args:
        model: any module; a plan is known for the families of Llama, Qwen, DeepSeek and gpt_oss, and found for others
            of ``transformers`` (a PEFT model around one, too).
        dims: degrees of parallelism.
        plan: names of modules to styles, in the place of the known plan. They are applied
            where tp has more than one rank.
        sequence_parallel: shard activations between attention and MLP along the sequence. None: where tp has several
            ranks and the plan can.
        loss_parallel: leave the logits sharded by vocabulary, a DTensor. None: the same; False: plain logits, gathered.
        checkpointing: ``"none"``, ``"full"`` (each block keeps its inputs only, and computes again for backward), or
            ``"selective"`` (each block also keeps what matrix products and attention gave).
        mp_policy, offload_policy: of :func:`fully_shard`.
        compile: compile each kind of block once.

    Returns:
        The model.

    Raises:
        ValueError: what was asked for cannot be: an axis that shards no parameter, an explicit
            ``sequence_parallel`` or ``loss_parallel`` that the plan has not, an unknown ``checkpointing``.
        NotImplementedError: pp, cp, ep, or compile.
    """
    _refuse_unfinished(dims, compile)
    base = inside_adapters(model)
    chosen = choose_plan(base, dims, plan, sequence_parallel, loss_parallel)
    blocks, name = blocks_of(base), type(base).__name__
    share_values(model)
    with replaces_parameters([model], "parallelize"):
        if dims.tp > 1:
            apply_plan(model, base, dims.get_mesh("tp"), chosen.styles)
            join_gradients_of_blocks(blocks.values())
        checkpoint_blocks(base, blocks, checkpointing)
        adapt_root_call(base, dims)
        shard_over_data(base, blocks, dims, mp_policy, offload_policy)
        adapt_generate(base, dims)
    record = Parallelized(dims, chosen, blocks, checkpointing)
    check_what_is_whole(base, name, record)
    note_parallelized(model, base, record)
    return model


def _refuse_unfinished(dims: ParallelDims, compile: bool) -> None:
    if dims.pp > 1:
        raise NotImplementedError(f"parallelize: pp={dims.pp}: pipeline stages are not there yet; use tp and dp_shard")
    if dims.cp > 1:
        raise NotImplementedError(
            f"parallelize: cp={dims.cp}: no plan shards attention along the sequence yet; use sequence_parallel with tp"
        )
    if dims.ep > 1:
        raise NotImplementedError(
            f"parallelize: ep={dims.ep}: experts cannot be sharded by their number yet; with tp each expert is sharded "
            "by its features, with dp_shard by its parameters"
        )
    if compile:
        raise NotImplementedError("parallelize(compile=True): blocks cannot be compiled yet; leave it False")
