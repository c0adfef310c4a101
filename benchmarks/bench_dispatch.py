"""Host cost of one operator: warm and on a cache miss, beside plain tensors and torch.distributed.tensor.

Fake ranks: what is measured is Python and C++ on the host. Aims: a warm operator at most 8 us (aim 5) above the
plain one; a miss below 150 us on a 1-D mesh, and growing linearly with the mesh's rank.
"""

from __future__ import annotations

import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from timing import interleaved, start_fake_ranks, table
from torch.distributed.tensor import distribute_tensor as torch_distribute

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh


def operands(mesh, distribute, grad):
    """x and y sharded by rows, x replicated and a weight sharded by output features."""
    options = {"src_data_rank": None}
    x = distribute(torch.randn(64, 8), mesh, [Shard(0)], **options)
    whole = distribute(torch.randn(8, 8), mesh, [Replicate()], **options)
    weight = distribute(torch.randn(64, 8), mesh, [Shard(0)], **options)
    for tensor in (x, weight):
        tensor.requires_grad_(grad)
    return x, whole, weight


def warm(mesh) -> None:
    """The same call again and again."""
    rows = []
    for grad in (False, True):
        ours, theirs = operands(mesh, distribute_tensor, grad), operands(mesh, torch_distribute, grad)
        plain = [t.to_local().detach().requires_grad_(t.requires_grad) for t in ours]
        for name, call in (
            ("add", lambda t: t[0] + t[0]),
            ("mul by a number", lambda t: t[0] * 2.0),
            ("linear", lambda t: F.linear(t[1], t[2])),
            ("transpose", lambda t: t[0].transpose(0, 1)),
            ("view", lambda t: t[0].view(-1, 2, 4)),
            ("softmax", lambda t: F.softmax(t[0], -1)),
            ("rms_norm", lambda t: F.rms_norm(t[0], (8,))),
        ):
            contenders = {
                "plain": lambda call=call, t=plain: call(t),
                "ours": lambda call=call, t=ours: call(t),
                "torch": lambda call=call, t=theirs: call(t),
            }
            if name == "view":
                contenders["plain"] = lambda t=plain: t[0].view(-1, 2, 4)
            best = interleaved(contenders, calls=1000, blocks=15)
            added = best["ours"] - best["plain"]
            rows.append(
                [
                    f"{name}{' with grad' if grad else ''}",
                    best["plain"],
                    best["ours"],
                    best["torch"],
                    added,
                    best["torch"] - best["plain"],
                ]
            )
    table(
        "Warm operator, us (least block mean)", ["operator", "plain", "ours", "torch", "added", "added by torch"], rows
    )


def misses() -> None:
    """A shape that was not seen before, on meshes of 1 to 4 axes."""
    rows = []
    for shape in ((8,), (2, 4), (2, 2, 2), (2, 2, 2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abcd"[: len(shape)]))
        placements = [Shard(0)] + [Replicate()] * (len(shape) - 1)
        weight = [Replicate()] * (len(shape) - 1) + [Shard(0)]
        row: list[object] = ["x".join(map(str, shape))]
        for name in ("add", "linear", "view"):
            for distribute in (distribute_tensor, torch_distribute):
                w = distribute(torch.randn(64, 8), mesh, weight, src_data_rank=None)
                times = []
                for i in range(55 if distribute is distribute_tensor or len(shape) == 1 else 6):
                    x = distribute(torch.randn(8 * (i + 3), 8), mesh, placements, src_data_rank=None)
                    y = distribute(torch.randn(8 * (i + 3), 8), mesh, [Replicate()] * len(shape), src_data_rank=None)
                    start = time.perf_counter()
                    _ = x + x if name == "add" else x.view(-1, 2, 4) if name == "view" else F.linear(y, w)
                    times.append((time.perf_counter() - start) * 1e6)
                row.append(statistics.median(times[5:] or times))
        rows.append(row)
    names = [f"{n}{who}" for n in ("add", "linear", "view") for who in ("", " torch")]
    table("Cache miss, us (median over new shapes)", ["mesh", *names], rows)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    start_fake_ranks()
    warm(init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)))
    misses()
