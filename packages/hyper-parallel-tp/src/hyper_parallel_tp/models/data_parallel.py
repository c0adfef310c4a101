"""``fully_shard`` on the blocks of a model and on its rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import hyper_parallel
from hyper_parallel_tp.parallel_dims import ParallelDims

__all__ = ["shard_over_data"]


def shard_over_data(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    dims: ParallelDims,
    mp_policy: Any,
    offload_policy: Any,
) -> None:
    """Wrap blocks first, then the model, where there is a data axis or a policy to follow."""
    if dims.sizes()["batch"] == 1 and mp_policy is None and offload_policy is None:
        return
    policies = {"mp_policy": mp_policy, "offload_policy": offload_policy}
    fully_shard: Any = getattr(hyper_parallel, "fully_shard")  # noqa: B009 - of another package, found when asked for
    options = {name: policy for name, policy in policies.items() if policy is not None}
    mesh = dims.get_mesh(("dp_replicate", "fsdp"))
    for block in blocks.values():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
