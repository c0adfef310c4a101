"""Distributed rules and sharding plans for the Qwen family: what it needs beyond hyper-parallel-ops-basic.

This version has no contents yet.
"""
