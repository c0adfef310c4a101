"""Test kit: real gloo ranks for pytest, kept alive between tests.

Names are resolved on first use (PEP 562), so that importing this package imports no torch: pytest loads
``hyper_parallel.testing.pytest_plugin`` at the start of every run, also of projects that never use a rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.testing.failures import NotSendableError, RankFailure, RanksFailed, RanksSkipped, RanksTimedOut
    from hyper_parallel.testing.pool import WorkerPool
    from hyper_parallel.testing.pool_set import PoolSet

__all__ = ["NotSendableError", "PoolSet", "RankFailure", "RanksFailed", "RanksSkipped", "RanksTimedOut", "WorkerPool"]

_HOMES = {
    "NotSendableError": "failures",
    "PoolSet": "pool_set",
    "RankFailure": "failures",
    "RanksFailed": "failures",
    "RanksSkipped": "failures",
    "RanksTimedOut": "failures",
    "WorkerPool": "pool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
