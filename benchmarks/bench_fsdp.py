"""``fully_shard`` beside torch's: host overhead on fake ranks; step time, collectives, bytes and memory on gloo ranks.

The model is a stack of Transformer layers, each wrapped, then the whole. Aims: at most torch's collectives and bytes,
less than half of its host overhead, no slower steps.

Host overhead is CPU time per forward and backward above that of the plain model, contenders in interleaved blocks.
Steps on gloo are wall time, both contenders in turn in the same processes; the median counts. Memory is what a
step needs at its peak above what is there between steps, as Linux counts it, in processes of its own.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import interleaved, start_fake_ranks, table
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
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


def status(name: str) -> int:
    """A number of this process, in KiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])


def on_rank(rank: int, world_size: int, store: str, names: list[str], steps: int, answers: Any) -> None:
    """Train the named contenders in turn; rank 0 answers with what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    plain = Model(layers=4, width=256, words=1024)
    ids = torch.randint(0, 1024, (4, 64), generator=torch.Generator().manual_seed(rank))
    models = {name: wrapped(copy.deepcopy(plain), CONTENDERS[name], world_size) for name in names}
    del plain
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01, foreach=False) for name, model in models.items()}
    found: dict[str, Any] = {name: {"times": []} for name in names}
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
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later is not in use
    rest = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    models[names[0]](ids).square().mean().backward()
    peak = status("VmHWM") - rest
    if rank == 0:
        answers.put((found, peak))
    dist.destroy_process_group()


def measured(world_size: int, names: list[str], steps: int) -> tuple[dict[str, Any], int]:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, os.path.join(folder, "store"), names, steps, answers)
        ranks = [context.Process(target=on_rank, args=(rank, *arguments)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        found, peak = answers.get()
        for process in ranks:
            process.join()
    return found, peak


def on_gloo(world_size: int) -> None:
    """Both in the same processes, then each alone for its memory."""
    found, _ = measured(world_size, list(CONTENDERS), steps=15)
    rows: list[list[object]] = []
    for name, one in found.items():
        _, peak = measured(world_size, [name], steps=2)
        times = sorted(one["times"])
        rows.append(
            [name, statistics.median(times) * 1e3, times[0] * 1e3, one["count"], one["nbytes"] / 2**20, peak / 2**10]
        )
    title = f"training step, {world_size} gloo ranks, 4 layers, 3.7 M parameters"
    table(title, ["", "median ms", "least ms", "collectives", "MiB sent", "peak MiB"], rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    host_overhead()
    for ranks in (2, 4):
        on_gloo(ranks)
