"""Parameter sharding (fully_shard) over many-dimensional meshes.

This version has no contents yet.
"""
