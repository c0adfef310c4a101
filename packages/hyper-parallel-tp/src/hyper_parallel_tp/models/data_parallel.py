"""``fully_shard`` on the blocks of a model, its experts and its rest, over the meshes that are for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

import hyper_parallel
from hyper_parallel_tp.parallel_dims import ParallelDims

__all__ = ["shard_over_data"]


def shard_over_data(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    experts: Sequence[nn.Module],
    dims: ParallelDims,
    mp_policy: Any,
    offload_policy: Any,
) -> None:
    """Wrap blocks first, then the model, where there is a data axis or a policy to follow.

    Experts that are spread over ep share their ranks with data and tp: they have a mesh of their own, and their
    gradients are sums over tokens of all data ranks, divided by the number of batches as those of the others are.
    """
    batches = dims.sizes()["batch"]
    if batches == 1 and mp_policy is None and offload_policy is None:
        return
    policies = {"mp_policy": mp_policy, "offload_policy": offload_policy}
    fully_shard: Any = getattr(hyper_parallel, "fully_shard")  # noqa: B009 - of another package, found when asked for
    options = {name: policy for name, policy in policies.items() if policy is not None}
    module: Any
    for module in experts:
        fully_shard(module, mesh=dims.get_mesh(("dp_replicate", "efsdp")), **options)
        module.set_gradient_divide_factor(float(batches))
    mesh = dims.get_mesh(("dp_replicate", "fsdp"))
    for block in blocks.values():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
