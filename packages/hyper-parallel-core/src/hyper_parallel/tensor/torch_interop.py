"""To and from PyTorch's own ``torch.distributed.tensor.DTensor``; the local tensor is shared, nothing is sent."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor as TorchDTensor

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import PackedShard
from hyper_parallel.tensor.dtensor import DTensor


def from_torch(tensor: Any) -> DTensor:
    """Take over a PyTorch DTensor.

    Raises:
        TypeError: it is none.
        ValueError: it has a placement that this library does not know (``_StridedShard``).
    """
    if not isinstance(tensor, TorchDTensor):
        raise TypeError(f"from_torch takes a torch.distributed.tensor.DTensor, got {type(tensor).__name__}")
    layout = Layout.from_placements(tensor.device_mesh, tensor.placements, ndim=tensor.ndim)
    return DTensor.from_local(tensor.to_local(), layout, shape=tensor.shape, stride=tensor.stride())


def to_torch(tensor: DTensor) -> Any:
    """The tensor as PyTorch's DTensor.

    Raises:
        ValueError: PyTorch has no placement for its layout (packed shards, or axes that shard a dim out of mesh order).
    """
    layout = tensor.layout
    packed = any(isinstance(p, PackedShard) for p in layout.placements)
    if packed or any(list(axes) != sorted(axes) for axes in layout.shard_order):
        raise ValueError(
            f"PyTorch's DTensor cannot describe {layout}; redistribute() to plain shards in mesh order first"
        )
    return TorchDTensor.from_local(
        tensor.to_local(),
        layout.mesh,
        layout.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
        grad_placements=tensor.grad_placements,
    )
