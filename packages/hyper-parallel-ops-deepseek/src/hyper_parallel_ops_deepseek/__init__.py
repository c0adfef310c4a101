"""Distributed rules and sharding plans for the DeepSeek family: what it needs beyond hyper-parallel-ops-basic.

This version has no contents yet.
"""
