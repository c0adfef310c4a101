"""Declarative tensor parallelism (parallelize_module and its styles).

This version has no contents yet.
"""
