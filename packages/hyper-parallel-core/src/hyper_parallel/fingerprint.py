"""Catch ranks with different plugins when a mesh is first used, instead of by a hang inside a later collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import PluginError

if TYPE_CHECKING:
    from hyper_parallel.mesh import MeshInfo


def check_same_plugins(info: MeshInfo) -> None:
    """Compare the registry fingerprint of all ranks of a mesh.

    One all-reduce of 16 bytes per mesh axis; every rank comes to the same verdict.

    Raises:
        PluginError: when they differ; the message lists each rank's plugins.
    """
    if info.coordinate is None or info.mesh.size() == 1 or dist.get_backend(info.mesh.get_group(0)) == "fake":
        return
    from hyper_parallel.registry import default_registry

    registry = default_registry()
    digest = int(registry.fingerprint()[:15], 16)
    extremes = torch.tensor([digest, -digest], device=info.default_device())
    for axis in range(info.ndim):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=info.mesh.get_group(axis))
    if int(extremes[0]) != -int(extremes[1]):
        raise PluginError(_difference(info, registry))


def _difference(info: MeshInfo, registry: Any) -> str:
    seen = {dist.get_rank(): sorted({(entry.name, entry.provider) for entry in registry.entries()})}
    for axis in range(info.ndim):
        group = info.mesh.get_group(axis)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, seen, group=group)
        for part in gathered:
            seen.update(part)
    common = set.intersection(*(set(ops) for ops in seen.values()))
    lines = ["the ranks of this mesh have different operators registered; install the same packages everywhere"]
    for rank, ops in sorted(seen.items()):
        extra = [f"{name} ({provider})" for name, provider in ops if (name, provider) not in common]
        lines.append(f"  rank {rank}: {', '.join(extra[:12]) or 'nothing beyond the common ones'}")
    return "\n".join(lines)
