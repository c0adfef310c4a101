"""What a plugin sees of the registry in ``hyper_parallel_register_ops``: it records who registers what, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hyper_parallel._rules.op import DistributedOp


class OpRegistrar(Protocol):
    """Takes the ops of one plugin."""

    def register(
        self, name: str, op: DistributedOp | Callable[[], DistributedOp], *, override: bool | Sequence[str] = ()
    ) -> None:
        """Register an op under this plugin's name.

        Args:
            name: bare or dotted function name, as in an op table (:mod:`hyper_parallel.plugins.op_table`).
            op: the op, or a function without arguments that makes it when it is first used.
            override: plugins whose implementation of this op the new one replaces; True for every plugin's.
        """
