"""Cross entropy of vocabulary shards: peak memory and time, beside torch's loss_parallel and the gathered path.

Real gloo ranks, one pool per contender, so that nobody inherits another's memory. Peak memory is what the resident set
of rank 0 grows by over forward and backward, inputs not included, in MB and in multiples of the local scores (float32).
Time is CPU time of rank 0, the least of several runs: wall-clock would tell how many ranks share a core.

    python benchmarks/bench_loss.py [--tokens 1024] [--vocabulary 32768] [--features 256] [--ranks 2]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import table

from hyper_parallel import (
    FusedLinearCrossEntropyLoss,
    Replicate,
    Shard,
    distribute_tensor,
    gather_tensor_parallel_logits,
    init_device_mesh,
    loss_parallel,
)
from hyper_parallel.testing import WorkerPool

REPEATS = 3


def ours(scores: Any, labels: Any) -> Any:
    with loss_parallel():
        return F.cross_entropy(scores, labels)


def gathered(scores: Any, labels: Any) -> Any:
    return F.cross_entropy(gather_tensor_parallel_logits(scores), labels)


def torchs(scores: Any, labels: Any) -> Any:
    from torch.distributed.tensor.parallel import loss_parallel as torchs_loss_parallel

    with torchs_loss_parallel():
        loss = F.cross_entropy(scores, labels)
        loss.backward()
    return loss


def torchs_gathered(scores: Any, labels: Any) -> Any:
    return F.cross_entropy(scores, labels)  # without the context torch gathers


def head(loss: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda hidden, weight, labels: loss(F.linear(hidden, weight), labels)


def fused(hidden: Any, weight: Any, labels: Any) -> Any:
    return FusedLinearCrossEntropyLoss()(hidden, weight, labels)


SCORES = {
    "hyper_parallel": ours,
    "torch loss_parallel": torchs,
    "gathered": gathered,
    "torch gathered": torchs_gathered,
}
HEADS = {"head, hyper_parallel": head(ours), "head, torch loss_parallel": head(torchs), "head, fused in chunks": fused}


def measure(name: str, tokens: int, vocabulary: int, features: int) -> tuple[float, float]:
    """Milliseconds and peak growth in bytes of one contender, on this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    if "torch" in name:
        from torch.distributed.tensor import distribute_tensor as spread
    else:
        spread = distribute_tensor
    labels = spread(torch.randint(vocabulary, (tokens,)), mesh, [Replicate()])
    if name in SCORES:
        leaves = [spread(torch.randn(tokens, vocabulary), mesh, [Shard(1)])]
    else:
        weight = spread(torch.randn(vocabulary, features) * 0.02, mesh, [Shard(0)])
        leaves = [spread(torch.randn(tokens, features), mesh, [Replicate()]), weight]
    loss = {**SCORES, **HEADS}[name]

    def step() -> None:
        fresh = [leaf.detach().requires_grad_() for leaf in leaves]
        value = loss(*fresh, labels)
        if fresh[0].grad is None:
            value.backward()

    step()
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.process_time()
        step()
        times.append((time.process_time() - start) * 1e3)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    step()
    return min(times), resident("VmHWM") - before


def resident(field: str) -> float:
    """A field of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return float(text.split(f"{field}:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, value in (("tokens", 1024), ("vocabulary", 32768), ("features", 256), ("ranks", 2)):
        parser.add_argument(f"--{option}", type=int, default=value)
    arguments = parser.parse_args()
    # Large tensors are given back to the system when they die, so that the resident set is what is alive.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    local = arguments.tokens * -(-arguments.vocabulary // arguments.ranks) * 4
    rows: list[list[object]] = []
    for name in (*SCORES, *HEADS):
        pool = WorkerPool(arguments.ranks)
        try:
            sizes = (arguments.tokens, arguments.vocabulary, arguments.features)
            milliseconds, peak = pool.run(measure, name, *sizes, timeout=600)[0]
        finally:
            pool.stop()
        rows.append([name, milliseconds, peak / 2**20, peak / local])
    title = f"{arguments.tokens} tokens, vocabulary {arguments.vocabulary} over {arguments.ranks} ranks, float32"
    table(title, ["forward and backward", "CPU ms", "peak MB", "x local scores"], rows)


if __name__ == "__main__":
    main()
