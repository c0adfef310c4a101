"""Declarative tensor parallelism: ``parallelize_module`` and its styles.

The names are reached as ``from hyper_parallel import ColwiseParallel``.
"""
