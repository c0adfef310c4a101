"""Parameter sharding (``fully_shard``) over many-dimensional meshes.

Importing this package imports no torch, as its plugin module must not; each name below is loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

    from hyper_parallel_fsdp.api import fully_shard as fully_shard
    from hyper_parallel_fsdp.clip_grad import clip_grad_norm_ as clip_grad_norm_
    from hyper_parallel_fsdp.group_info import DataGroups as DataGroups
    from hyper_parallel_fsdp.group_info import GroupInfo as GroupInfo
    from hyper_parallel_fsdp.module import FSDPModule as FSDPModule
    from hyper_parallel_fsdp.module import HSDPModule as HSDPModule
    from hyper_parallel_fsdp.module import UnshardHandle as UnshardHandle
    from hyper_parallel_fsdp.module import hsdp_sync_stream as hsdp_sync_stream
    from hyper_parallel_fsdp.module import register_fsdp_forward_method as register_fsdp_forward_method
    from hyper_parallel_fsdp.parameter import HSDPParam as HSDPParam

PUBLIC_NAMES = {
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "DataGroups": "hyper_parallel_fsdp.group_info",
    "FSDPModule": "hyper_parallel_fsdp.module",
    "GroupInfo": "hyper_parallel_fsdp.group_info",
    "HSDPModule": "hyper_parallel_fsdp.module",
    "HSDPParam": "hyper_parallel_fsdp.parameter",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "UnshardHandle": "hyper_parallel_fsdp.module",
    "clip_grad_norm_": "hyper_parallel_fsdp.clip_grad",
    "fully_shard": "hyper_parallel_fsdp.api",
    "hsdp_sync_stream": "hyper_parallel_fsdp.module",
    "register_fsdp_forward_method": "hyper_parallel_fsdp.module",
}
"""Each public name and the module that defines it. The policies are PyTorch's own."""

__all__ = [*PUBLIC_NAMES]


def __getattr__(name: str) -> Any:
    if name in PUBLIC_NAMES:
        return getattr(import_module(PUBLIC_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
