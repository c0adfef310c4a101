"""Test kit: real gloo ranks for pytest, kept alive between tests, and the conformance kit for operators.

Names are resolved on first use (PEP 562), so that importing this package imports no torch: pytest loads
``hyper_parallel.testing.pytest_plugin`` at the start of every run, also of projects that never use a rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.testing.case_runner import OpUnderTest
    from hyper_parallel.testing.conformance import OpConformance, check_op
    from hyper_parallel.testing.failures import NotSendableError, RankFailure, RanksFailed, RanksSkipped, RanksTimedOut
    from hyper_parallel.testing.inputs import at_most, sample, tensor
    from hyper_parallel.testing.placing import make, mesh_of
    from hyper_parallel.testing.plugin_contract import PluginContract
    from hyper_parallel.testing.pool import WorkerPool
    from hyper_parallel.testing.pool_set import PoolSet
    from hyper_parallel.testing.trial import ConformanceError

__all__ = [
    "ConformanceError",
    "NotSendableError",
    "OpConformance",
    "OpUnderTest",
    "PluginContract",
    "PoolSet",
    "RankFailure",
    "RanksFailed",
    "RanksSkipped",
    "RanksTimedOut",
    "WorkerPool",
    "at_most",
    "check_op",
    "make",
    "mesh_of",
    "sample",
    "tensor",
]

_HOMES = {
    "ConformanceError": "trial",
    "NotSendableError": "failures",
    "OpConformance": "conformance",
    "OpUnderTest": "case_runner",
    "PluginContract": "plugin_contract",
    "PoolSet": "pool_set",
    "RankFailure": "failures",
    "RanksFailed": "failures",
    "RanksSkipped": "failures",
    "RanksTimedOut": "failures",
    "WorkerPool": "pool",
    "at_most": "inputs",
    "check_op": "conformance",
    "make": "placing",
    "mesh_of": "placing",
    "sample": "inputs",
    "tensor": "inputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
