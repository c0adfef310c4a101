"""One pool per world size, for as long as memory allows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.testing.pool import WorkerPool


class PoolSet:
    """Pools by world size, started when first used. Above ``max_alive``, the one unused for longest is stopped."""

    def __init__(self, *, max_alive: int = 2) -> None:
        if max_alive < 1:
            raise ValueError(f"max_alive must be at least 1, got {max_alive}")
        self._max_alive = max_alive
        self._pools: OrderedDict[int, WorkerPool] = OrderedDict()

    def pool(self, world_size: int) -> WorkerPool:
        """The pool of that size, now the most recently used."""
        if world_size not in self._pools:
            pool = WorkerPool(world_size)
            while len(self._pools) >= self._max_alive:
                self._pools.popitem(last=False)[1].stop()
            self._pools[world_size] = pool
        self._pools.move_to_end(world_size)
        return self._pools[world_size]

    def call(
        self, world_size: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, timeout: float
    ) -> list[Any]:
        """`WorkerPool.call` on ``world_size`` ranks."""
        return self.pool(world_size).call(fn, args, kwargs, timeout=timeout)

    def close(self) -> None:
        """Stop all pools."""
        while self._pools:
            self._pools.popitem()[1].stop()
