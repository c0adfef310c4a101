"""Catch ranks with different plugins when a mesh is first used, instead of by a hang inside a later collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import PluginError
from hyper_parallel.registry.kernel_packages import refuse_kernels_without_rules
from hyper_parallel.registry.registry import default_registry

if TYPE_CHECKING:
    from hyper_parallel.sharding.mesh import MeshInfo

SHOWN = 12
"""Differences listed per rank."""
UNLOADED = "cannot be loaded"


def check_same_plugins(info: MeshInfo) -> None:
    """Compare the registry fingerprint of all ranks of a mesh.

    One all-reduce of 24 bytes per mesh axis; every rank comes to the same verdict. A rank whose plugins cannot be
    loaded takes part too, so that the others do not wait for it.

    Raises:
        PluginError: when they differ, or cannot be loaded on some rank; the message lists what each rank has.
    """
    refuse_kernels_without_rules()
    registry = default_registry()
    if info.coordinate is None or info.mesh.size() == 1 or dist.get_backend(info.group((0,)).group) == "fake":
        registry.entries()  # loads the rules: functions that do not reach DTensor by themselves are served from now on
        return
    digest, failure = 0, None
    try:
        digest = int(registry.fingerprint()[:15], 16)
        lines = registry.fingerprint_lines()
    except PluginError as error:
        failure, lines = error, [f"{UNLOADED}: {str(error).splitlines()[0]}"]
    extremes = torch.tensor([digest, -digest, int(failure is not None)], device=info.default_device())
    for axis in range(info.ndim):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=info.group((axis,)).group)
    highest, lowest, failed = extremes.tolist()
    if failed or highest != -lowest:
        raise PluginError(_difference(info, lines)) from failure


def _difference(info: MeshInfo, lines: list[str]) -> str:
    """What each rank has that not all have."""
    seen = {dist.get_rank(): lines}
    for axis in range(info.ndim):
        group = info.group((axis,)).group
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, seen, group=group)
        for part in gathered:
            seen.update(part)
    common = set.intersection(*map(set, seen.values()))
    text = ["the ranks of this mesh have different operators registered; install the same packages everywhere"]
    if faulty := {rank: its for rank, its in seen.items() if its and its[0].startswith(UNLOADED)}:
        # What the others have is no help.
        seen, common, text = faulty, set(), ["the plugins of some ranks of this mesh cannot be used"]
    for rank, its in sorted(seen.items()):
        extra = [line for line in its if line not in common]
        text.append(f"  rank {rank}: {extra[0] if extra else 'nothing beyond the common ones'}")
        text += [f"          {line}" for line in extra[1:SHOWN]]
        if len(extra) > SHOWN:
            text.append(f"          and {len(extra) - SHOWN} more")
    return "\n".join(text)
