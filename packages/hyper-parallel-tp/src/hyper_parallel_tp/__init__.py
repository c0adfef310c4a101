"""Declarative tensor parallelism (parallelize_module and its styles)."""
