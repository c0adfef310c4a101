"""Import path of the RFC for the functions that register ops."""

from hyper_parallel.registry import get_distributed_op, register_distributed_op

__all__ = ["get_distributed_op", "register_distributed_op"]
