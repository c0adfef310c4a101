"""Import path of the RFC for :class:`hyper_parallel.DistributedOp`."""

from hyper_parallel.op import DistributedOp

__all__ = ["DistributedOp"]
