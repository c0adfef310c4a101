"""Train a small Qwen3 model from `transformers` with `fully_shard`, alone or over tensor parallelism.

    torchrun --nproc-per-node 4 examples/fully_sharded.py           # dp=4: parameters sharded over four ranks
    torchrun --nproc-per-node 4 examples/fully_sharded.py --tp 2    # dp=2 x tp=2: one DTensor carries both

The model's code is unmodified. It trains beside the same model in plain PyTorch on the whole batch, and ends with the
largest difference of a loss, which is rounding.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from hyper_parallel import clip_grad_norm_, fully_shard, init_device_mesh, parallelize_module

BATCH, LENGTH, WORDS = 8, 16, 50


def make_model() -> Qwen3ForCausalLM:
    """The same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 60, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=WORDS, tie_word_embeddings=True, use_cache=False, **sizes, **heads))


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    """One step; the loss."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main(arguments: Sequence[str] | None = None) -> float:
    """Train both; the largest difference of a loss."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a batch and split the layers' work")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(arguments)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))

    plain = make_model()
    model = copy.deepcopy(plain)
    if args.tp > 1:
        parallelize_module(model, mesh["tp"])  # the plan that transformers has for its model
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # what is left: the embedding, which is the head too, and the last norm

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for step in range(args.steps):
        batch = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
        mine = batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
        loss = train_step(model, optimizers[0], mine)
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        expected = train_step(plain, optimizers[1], batch)
        worst = max(worst, abs(float(loss - expected)))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}, on one device {expected:.6f}")
    weight = model.get_input_embeddings().weight
    if dist.get_rank() == 0:
        print(f"embedding: {weight.layout}, {tuple(weight.local_shape)} of {tuple(weight.shape)} on this rank")
        print(f"largest difference of a loss: {worst:.1e}")
    return worst


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
