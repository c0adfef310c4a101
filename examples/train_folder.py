"""From a folder to a folder: torchrun --nproc-per-node 4 examples/train_folder.py Qwen3-0.6B tuned"""

import sys

import torch
import torch.distributed as dist

from hyper_parallel import ParallelDims, clip_grad_norm_, load_pretrained, parallel_report, shard_batch

folder, out = sys.argv[1:]
dist.init_process_group()
try:
    dims = ParallelDims(dp_shard=2, tp=2)
    model = load_pretrained(folder, dims)
    if dist.get_rank() == 0:
        print(parallel_report(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(10):
        torch.manual_seed(step)  # in the place of your data: the same batch on every rank
        ids = torch.randint(0, model.config.vocab_size, (8, 64)).to(model.device)
        loss = model(**shard_batch({"input_ids": ids, "labels": ids}, dims)).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
finally:
    dist.destroy_process_group()
