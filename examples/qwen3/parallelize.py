"""Qwen3 from a folder of safetensors onto many ranks; no rank ever holds the whole model.

    torchrun --nproc-per-node 4 examples/qwen3/parallelize.py FOLDER

`FOLDER` is what `save_pretrained` writes, or a snapshot of the Hugging Face hub. Without it a small model is made.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from hyper_parallel import ParallelDims, fully_shard, parallelize_module
from hyper_parallel_tp.plans.decoders import qwen3_plan


def parallelize_qwen3(folder: Path, dims: ParallelDims) -> nn.Module:
    """Build without memory, spread, then read this rank's pieces."""
    config = transformers.AutoConfig.from_pretrained(folder, use_cache=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).train()

    parallelize_module(model, dims.get_mesh("tp"), qwen3_plan(sequence_parallel=True, loss_parallel=True))
    for layer in model.model.layers:
        fully_shard(layer, mesh=dims.get_mesh("fsdp"))
    fully_shard(model, mesh=dims.get_mesh("fsdp"))

    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # computed by the model, not saved
    dcp.load(dict(model.named_parameters()), storage_reader=HuggingFaceStorageReader(str(folder)))
    return model


def batch(vocab_size: int) -> torch.Tensor:
    """Token ids, the same on all ranks."""
    return torch.randint(0, vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))


def train(folder: Path, steps: int = 5) -> list[float]:
    """Loss of each step on one batch that all ranks share."""
    model = parallelize_qwen3(folder, ParallelDims(tp=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = batch(model.config.vocab_size)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_small_model(folder: Path) -> None:
    """A Qwen3 to try this with."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Train the model in the folder that the command line names, or a small one, and show the losses once."""
    given = [Path(sys.argv[1])] if len(sys.argv) > 1 else [Path(tempfile.mkdtemp())]
    dist.broadcast_object_list(given)  # the first rank's folder
    if len(sys.argv) == 1 and dist.get_rank() == 0:
        save_small_model(given[0])
    dist.barrier()
    found = train(given[0])
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.4f}" for loss in found))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
