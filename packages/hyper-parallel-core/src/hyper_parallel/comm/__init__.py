"""Communication: collectives, how a layout is turned into another one, and the trace of what ran."""

from hyper_parallel.comm.primitives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]
