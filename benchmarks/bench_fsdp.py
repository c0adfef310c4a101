"""``fully_shard`` beside torch's: host overhead on fake ranks; step time, collectives, bytes and memory on gloo ranks.

The model is a stack of Transformer layers, each wrapped, then the whole. Aims: at most torch's collectives and bytes,
less than half of its host overhead, no slower steps.

Host overhead is CPU time per forward and backward above that of the plain model, contenders in interleaved blocks.
Steps on gloo are wall time, both contenders in turn in the same processes; the median counts. Memory is the highest sum
of what a step has allocated and not freed, by torch's own count.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from timing import interleaved, start_fake_ranks, table
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import fully_shard, init_device_mesh

CONTENDERS: dict[str, Callable[..., Any]] = {"hyper_parallel": fully_shard, "torch": torch_fully_shard}


class Model(nn.Module):
    """Layers of 16 parameters each between an embedding and a head."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped(model: Model, shard: Callable[..., Any], world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    for layer in model.layers:
        shard(layer, mesh=mesh)
    return shard(model, mesh=mesh)


def host_overhead() -> None:
    """CPU time above the plain model's."""
    start_fake_ranks(4)
    rows: list[list[object]] = []
    for layers in (4, 16):
        plain = Model(layers, 16, 32)
        ids = torch.zeros(1, 2, dtype=torch.int64)
        models = {"plain": plain}
        models |= {name: wrapped(copy.deepcopy(plain), shard, 4) for name, shard in CONTENDERS.items()}

        parameters = {name: list(model.parameters()) for name, model in models.items()}

        def step(name: str) -> None:
            models[name](ids).sum().backward()  # noqa: B023
            for parameter in parameters[name]:  # noqa: B023
                parameter.grad = None

        times = interleaved({name: lambda name=name: step(name) for name in models}, calls=3)  # type: ignore[misc]
        base = times["plain"]
        over = {name: (times[name] - base) / 1000 for name in CONTENDERS}
        ours, theirs = over["hyper_parallel"], over["torch"]
        rows.append([f"{layers} layers", base / 1000, ours, theirs, ours / theirs])
    title = "host overhead of forward + backward, fake ranks (ms; aim: ratio below 0.5)"
    table(title, ["", "plain", "hyper_parallel", "torch", "ratio"], rows)
    dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts the collectives of whoever calls them, and the bytes of the larger of their two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count += 1
            tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,))]
            self.nbytes += max(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def peak_of(step: Callable[[], object]) -> int:
    """Bytes that a step holds at its peak above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


def on_rank(rank: int, world_size: int, store: str, steps: int, answers: Any) -> None:
    """Train the contenders in turn; rank 0 answers with what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    plain = Model(layers=4, width=256, words=1024)
    ids = torch.randint(0, 1024, (4, 64), generator=torch.Generator().manual_seed(rank))
    models = {name: wrapped(copy.deepcopy(plain), shard, world_size) for name, shard in CONTENDERS.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01, foreach=False) for name, model in models.items()}
    found: dict[str, Any] = {name: {"times": []} for name in models}
    for step in range(steps + 2):
        for name, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            if step == 1:  # the first one finds out the order of the layers
                with Collectives() as counted:
                    model(ids).square().mean().backward()
                found[name] |= {"count": counted.count, "nbytes": counted.nbytes}
            else:
                model(ids).square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if step > 1:
                found[name]["times"].append(time.perf_counter() - start)
    for name, model in models.items():
        found[name]["peak"] = peak_of(lambda: model(ids).square().mean().backward())  # noqa: B023
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def on_gloo(world_size: int, steps: int = 15) -> None:
    """Both in the same processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, os.path.join(folder, "store"), steps, answers)
        ranks = [context.Process(target=on_rank, args=(rank, *arguments)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        found = answers.get()
        for process in ranks:
            process.join()
    rows: list[list[object]] = []
    for name, one in found.items():
        times = sorted(one["times"])
        sent, peak = one["nbytes"] / 2**20, one["peak"] / 2**20
        rows.append([name, statistics.median(times) * 1e3, times[0] * 1e3, one["count"], sent, peak])
    title = f"training step, {world_size} gloo ranks, 4 layers, 3.7 M parameters"
    table(title, ["", "median ms", "least ms", "collectives", "MiB sent", "peak MiB"], rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    host_overhead()
    for ranks in (2, 4):
        on_gloo(ranks)
