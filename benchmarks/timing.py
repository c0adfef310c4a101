"""Timing that survives a noisy machine: CPU time, contenders in interleaved blocks, and the least block mean counts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def start_fake_ranks(world_size: int = 8) -> None:
    """One process that believes to be rank 0 of many: collectives cost their host time only, and values are not
    right."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def interleaved(contenders: dict[str, Callable[[], object]], *, calls: int, blocks: int = 20) -> dict[str, float]:
    """Microseconds per call of each contender: the least mean over interleaved blocks."""
    best = dict.fromkeys(contenders, float("inf"))
    for call in contenders.values():
        for _ in range(3):
            call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(blocks):
            for name, call in contenders.items():
                start = time.process_time()
                for _ in range(calls):
                    call()
                best[name] = min(best[name], (time.process_time() - start) / calls * 1e6)
    finally:
        gc.enable()
    return best


def table(title: str, header: list[str], rows: list[list[object]]) -> None:
    """Print aligned columns, the first to the left, numbers to the right."""
    cells = [header] + [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]))
