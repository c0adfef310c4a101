"""What ``torch.amp.GradScaler`` calls on gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel import DTensor
from hyper_parallel.errors import RedistributionError
from hyper_parallel.rules import FunctionOp, MeshInfo, OpSummary, before_write, is_shard, local_of, primitives


class UnscaleGradients(FunctionOp):
    """``_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)``.

    An inf or nan in one rank's piece must stop the step on every rank: ``found_inf`` is all-reduced over the mesh axes
    that shard some gradient, once per mesh.
    """

    summary = OpSummary(
        "every dim of each gradient",
        pending="reduced first",
        communicates="1 all-reduce of the flag",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        grads, found, scale = args
        axes: dict[MeshInfo, set[int]] = {}
        for grad in grads:
            if isinstance(grad, DTensor):
                layout = grad.layout
                if layout.is_partial():
                    raise RedistributionError(
                        f"GradScaler: a gradient is a pending reduction ({layout}); reduce it first",
                        op_name=func.__name__,
                        layouts=[layout],
                    )
                axes.setdefault(layout.info, set()).update(a for a, p in enumerate(layout.placements) if is_shard(p))
                before_write(grad)  # the kernel counts no write
        found, scale = (local_of(t) if isinstance(t, DTensor) else t for t in (found, scale))
        func([local_of(g) if isinstance(g, DTensor) else g for g in grads], found, scale)
        for info, sharding in axes.items():
            apart = tuple(sorted(a for a in sharding if info.shape[a] > 1))
            if apart:
                primitives.all_reduce(found, info.group(apart), "max")
