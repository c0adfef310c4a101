"""Distributed rules for the DeepSeek family: what it needs beyond hyper-parallel-ops-basic."""
