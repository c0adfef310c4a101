"""The ``hyper-parallel`` program: one module per command, none of which imports torch unless its job needs it."""

from hyper_parallel.cli.program import main

__all__ = ["main"]
