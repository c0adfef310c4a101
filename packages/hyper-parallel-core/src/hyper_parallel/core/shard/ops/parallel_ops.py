"""Import path of the RFC for :class:`hyper_parallel.DistributedOp`."""

from hyper_parallel._rules.op import DistributedOp

__all__ = ["DistributedOp"]
