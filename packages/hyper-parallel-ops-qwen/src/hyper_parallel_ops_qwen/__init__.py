"""Distributed rules for the Qwen family: what it needs beyond hyper-parallel-ops-basic."""
