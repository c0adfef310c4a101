"""Llama 3 from `transformers`, its code unmodified, on ranks that share every layer (tp) and the parameters (fsdp).

    torchrun --nproc-per-node 4 examples/llama3/parallelize.py

The plan is spelt out here; `hyper_parallel_tp.plans.decoders.llama3_plan` is the same with switches.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from torch import nn

from hyper_parallel import (
    AttentionParallel,
    ColwiseParallel,
    ParallelDims,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    parallelize_module,
)


def parallelize_llama(model: nn.Module, dims: ParallelDims) -> nn.Module:
    """Tensor parallel inside a layer, sequence parallel between layers, logits split by vocabulary, then FSDP."""
    sequence = Shard(1)  # of hidden states [batch, sequence, features]: norms and residuals work on a part of it
    plan = {
        # Token ids on every rank -> each rank's part of the sequence (one reduce-scatter).
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=sequence, use_local_output=False
        ),
        "model.layers.*": {
            "input_layernorm": SequenceParallel(),
            # Gathers the sequence once for q, k and v, splits the heads, scatters the sequence again.
            "self_attn": AttentionParallel(input_layouts=sequence, output_layouts=sequence),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate()),
            "mlp.gate_proj": ColwiseParallel(use_local_output=False),
            "mlp.up_proj": ColwiseParallel(use_local_output=False),
            "mlp.down_proj": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        },
        "model.norm": SequenceParallel(),
        # The logits are never whole: the model's own cross entropy works on the pieces.
        "lm_head": ColwiseParallel(input_layouts=sequence, use_local_output=False),
    }
    parallelize_module(model, dims.get_mesh("tp"), plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=dims.get_mesh("fsdp"))
    return fully_shard(model, mesh=dims.get_mesh("fsdp"))


def small_llama() -> nn.Module:
    """A Llama to try this with, with the same parameters on every rank: FSDP trusts that its ranks agree."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def batch(data_rank: int) -> torch.Tensor:
    """The token ids of one data-parallel rank."""
    return torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(data_rank))


def train(steps: int = 5) -> list[float]:
    """Loss of each step, the mean over all ranks' data."""
    dims = ParallelDims(tp=2)
    model = parallelize_llama(small_llama(), dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = dims.get_mesh("batch")  # the ranks of one tp group work on the same batch, others on other ones
    ids = batch(data.get_local_rank())
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(loss.item())
        dist.all_reduce(mean, group=data.get_group())
        losses.append(mean.item() / data.size())
    return losses


def main() -> None:
    """Train, and show the losses once."""
    found = train()
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.4f}" for loss in found))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
