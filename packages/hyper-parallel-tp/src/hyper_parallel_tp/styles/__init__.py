"""Parallel styles: what parallelize_module applies to a module."""
