"""Ranks that are threads take turns: one runs at a time, until it waits for the others.

PyTorch keeps some state once per process, its default generator for example. A rank that has its turn finds there what
it left behind, so each rank has its own, as processes have.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Turns"]

_POLL = 0.2


class _ProcessState:
    """What a rank keeps of the process's state while it does not run; at first that of ``manual_seed(0)``."""

    def __init__(self) -> None:
        self._torch = torch.Generator().manual_seed(0).get_state()
        self._python = random.Random(0).getstate()
        self._dtype = torch.float32

    def swap(self) -> None:
        """Exchange it with the process's."""
        mine = self._torch, self._python, self._dtype
        self._torch, self._python, self._dtype = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
        torch.set_rng_state(mine[0])
        random.setstate(mine[1])
        torch.set_default_dtype(mine[2])


class Turns:
    """Lets one rank run at a time. The process's own state is put back after each turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rank = threading.local()
        self._over = threading.Event()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, this thread is a rank, and has its turn."""
        self._rank.state = _ProcessState()
        self._begin()
        try:
            yield
        finally:
            self._end()
            del self._rank.state

    def passing(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """A function that waits for other ranks, which run meanwhile."""

        def waiting(*args: Any, **kwargs: Any) -> Any:
            if not hasattr(self._rank, "state"):
                return wait(*args, **kwargs)
            self._end()
            try:
                return wait(*args, **kwargs)
            finally:
                self._begin()

        return waiting

    def stop(self) -> None:
        """Nobody gets a turn any more: ranks that wait for one end."""
        self._over.set()

    def _begin(self) -> None:
        while not self._lock.acquire(timeout=_POLL):
            if self._over.is_set():
                raise SystemExit("the other ranks do not end")
        self._rank.state.swap()
        self._rank.holds = True

    def _end(self) -> None:
        if getattr(self._rank, "holds", False):
            self._rank.holds = False
            self._rank.state.swap()
            self._lock.release()
