"""Training steps of whole models on 2 and 4 gloo ranks, beside transformers' parallelism and torch's TP and FSDP2.

Models are a small Qwen3 and a small Qwen3-MoE of ``transformers``, written to a folder once; contenders are in
``model_contenders.py``. All are alive in one set of rank processes and train in turn: forward, backward, SGD. The wall
time of a step is that of its slowest rank, and the median over the rounds counts. "plain" trains the whole model on one
rank's share of the batch and talks to no one, on all ranks at once: what a step takes without any communication.

The losses of the first steps must be those of one process with the whole batch, or the contender is out. Bytes are what
a ring would send for each collective that PyTorch is asked for, whoever asks; ours must agree with ``CommTrace``. Peak
memory is that of live tensors in the second step, parameters with it, each contender in processes of its own.

Arguments: ``--quick`` for tiny models, two ranks and few rounds; ``--rounds``; ``--ranks``; ``--only`` a part of names.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from model_contenders import QUICK, Contender, Entry, Sizes, entries, plain, save_models
from timing import table
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import logging

from hyper_parallel import CommTrace

CHECKED_STEPS = 3
LIMIT = 900.0  # seconds, for one set of rank processes
NOT_TRAFFIC = ("wait_tensor", "_wrap_tensor_autograd", "barrier")
PRELOADED = ["torch", "model_contenders", "transformers.distributed", "accelerate"]


class Traffic(TorchDispatchMode):
    """Counts collectives, and the bytes that a ring sends for each, of whoever asks PyTorch for them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.nbytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor: its own dispatch comes first, and what that asks for is seen here
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name not in NOT_TRAFFIC:
            self.count += 1
            # Lists of tensors are one buffer.
            largest = max(sum(t.numel() * t.element_size() for t in tensors_in(value)) for value in (*args, out))
            self.nbytes += sent_by_a_ring(name, largest, group_size(name, args))
        return out


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


def sent_by_a_ring(name: str, nbytes: float, ranks: int) -> float:
    """Bytes that each rank sends, where the largest buffer of a rank has ``nbytes``."""
    rounds = 2 if name.replace("_", "").startswith("allreduce") else 1
    return rounds * nbytes * (ranks - 1) / ranks


def group_size(name: str, args: Sequence[Any]) -> int:
    for argument in args:
        if isinstance(argument, dist.ProcessGroup):
            return argument.size()
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min"):
            resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
            return resolve(argument).size()
    raise ValueError(f"no process group in the arguments of {name}")


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def start_rank(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    quiet()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def built(entry: Entry, folder: str, sizes: Sizes, world_size: int, rank: int) -> Contender | str:
    """The contender, or what its library says against it on any rank."""
    contender: Contender | str
    try:
        contender = entry.build(folder, sizes.batch(), world_size, rank)
    except Exception as error:  # what a library cannot do is told in the table
        contender = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, contender if isinstance(contender, str) else None)
    return next((said for said in everyone if said), contender)


def train_in_turn(
    rank: int, world_size: int, folder: str, sizes: Sizes, rounds: int, only: str, references: dict[str, list[float]]
) -> dict[str, dict[str, Any]]:
    """Losses, bytes and times of all contenders, by name."""
    found: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Contender] = {}
    for entry in chosen(world_size, only):
        contender = built(entry, folder, sizes, world_size, rank)
        found[entry.name] = {"layout": entry.layout, "source": entry.source, "times": []}
        if isinstance(contender, str):
            found[entry.name]["refused"] = contender
            continue
        found[entry.name] |= checked(entry, contender, references[entry.source])
        contenders[entry.name] = contender
    names = list(contenders)
    for turn in range(rounds):
        gc.collect()
        gc.disable()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            contenders[name].step()
            found[name]["times"].append(time.perf_counter() - start)
        gc.enable()
    for name in names:
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, found[name]["times"])
        found[name]["times"] = [max(step) for step in zip(*everyone, strict=True)]
    return found


def checked(entry: Entry, contender: Contender, reference: list[float]) -> dict[str, Any]:
    """Train the first steps, compare their losses with those of one process, and count the bytes of the last."""
    losses = []
    for _ in range(CHECKED_STEPS - 1):
        losses.append(mean_over_ranks(contender.step()))
    with CommTrace() as trace, Traffic() as traffic:
        loss = contender.step()
    losses.append(mean_over_ranks(loss))
    worst = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
    if entry.name.startswith("plain"):  # each rank for itself: only the first loss is that of one process
        worst = abs(losses[0] - reference[0]) / reference[0]
    if worst > 1e-4:
        raise AssertionError(f"{entry.name}: losses {losses}, one process has {reference}")
    if entry.is_ours:
        by_trace = sum(sent_by_a_ring(event.op, event.nbytes, event.ranks) for event in trace.events)
        if traffic.nbytes != by_trace:
            raise AssertionError(f"{entry.name}: sends {traffic.nbytes} bytes, and CommTrace has {by_trace}:\n{trace}")
    return {"losses": losses, "worst": worst, "count": traffic.count, "nbytes": traffic.nbytes}


def mean_over_ranks(loss: Any) -> float:
    whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    mean = whole.double() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def peak_in_own_process(rank: int, world_size: int, folder: str, sizes: Sizes, name: str) -> int:
    """Highest sum of live tensors' bytes in the second step, over all ranks."""
    entry = next(entry for entry in entries(world_size) if entry.name == name)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        contender = entry.build(folder, sizes.batch(), world_size, rank)
        contender.step()
        gc.collect()
        with record_function("second step"):
            contender.step()
    events = profiled.profiler.kineto_results.events()
    start = next(e.start_ns() for e in events if e.name() == "second step")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = list(itertools.accumulate(nbytes for _, nbytes in changes))
    peak = torch.tensor(max(total for (when, _), total in zip(changes, held, strict=True) if when >= start))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak.item())


def on_rank(answer: Any, work: Callable[..., Any], rank: int, world_size: int, store: str, *arguments: Any) -> None:
    """One process: rank 0 answers with the result, any rank with what went wrong."""
    try:
        start_rank(rank, world_size, store)
        result = work(rank, world_size, *arguments)
        if rank == 0:
            answer.send((result, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer.send((None, f"rank {rank}: {traceback.format_exc()[-3000:]}"))
        raise


def on_ranks(work: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """Run ``work`` on new rank processes, and end them whatever happens."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # torch and transformers are imported once, and not by every rank
    receive, answer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        common = (world_size, os.path.join(folder, "store"), *arguments)
        ranks = [context.Process(target=on_rank, args=(answer, work, rank, *common)) for rank in range(world_size)]
        try:
            for process in ranks:
                process.start()
            if not receive.poll(LIMIT):
                raise TimeoutError(f"{work.__name__} on {world_size} ranks: no answer after {LIMIT:.0f} s")
            result, error = receive.recv()
            if error:
                raise RuntimeError(error)
            for process in ranks:
                process.join(30)
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return result


def chosen(world_size: int, only: str) -> list[Entry]:
    """Those whose name has ``only`` in it, and always what they are compared with."""
    found = entries(world_size)
    kept = [entry for entry in found if only in entry.name and not entry.name.startswith("plain")]
    sources = {entry.source for entry in kept}
    return [e for e in found if e in kept or (e.name.startswith("plain") and e.source in sources)]


def losses_of_one_process(folder: str, sizes: Sizes) -> dict[str, list[float]]:
    """Of the first steps with the whole batch, by model."""
    found = {}
    for source in ("dense", "moe"):
        contender = Contender(plain(f"{folder}/{source}"), sizes.batch(), 1, 1, 0)
        found[source] = [contender.step().item() for _ in range(CHECKED_STEPS)]
    return found


def report(world_size: int, found: dict[str, dict[str, Any]], sizes: Sizes) -> None:
    bases = {one["source"]: statistics.median(one["times"]) for name, one in found.items() if name.startswith("plain")}
    tokens = sizes.rows * sizes.tokens
    rows: list[list[object]] = []
    for name, one in found.items():
        if "refused" in one:
            rows.append([name, one["layout"], "refused", *[""] * 6])
            continue
        time_of_step = statistics.median(one["times"])
        rows.append(
            [
                name,
                one["layout"],
                f"{tokens / time_of_step:.0f}",
                time_of_step / bases[one["source"]],
                min(one["times"]) / bases[one["source"]],
                str(one["count"]),
                one["nbytes"] / 2**20,
                one["peak"] / 2**20,
                f"{one['worst']:.0e}",
            ]
        )
    title = f"training step of a whole model, {world_size} gloo ranks, {tokens} tokens"
    header = ["", "layout", "tokens/s", "of plain", "least", "collectives", "MiB sent", "peak MiB", "loss differs by"]
    table(title, header, rows)
    for name, one in found.items():
        if "refused" in one:
            print(f"{name}: {one['refused']}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models, 2 ranks, 2 rounds")
    parser.add_argument("--rounds", type=int, help="how many times each contender trains a step (default 15)")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (default 2 4)")
    parser.add_argument("--only", default="", help="contenders with this in their name")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    rounds = options.rounds or (2 if options.quick else 15)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {sizes}")
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        save_models(folder, sizes)
        references = losses_of_one_process(folder, sizes)
        for world_size in options.ranks or ((2,) if options.quick else (2, 4)):
            found = on_ranks(train_in_turn, world_size, folder, sizes, rounds, options.only, references)
            for name, one in found.items():
                if "refused" not in one:
                    one["peak"] = on_ranks(peak_in_own_process, world_size, folder, sizes, name)
            report(world_size, found, sizes)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
