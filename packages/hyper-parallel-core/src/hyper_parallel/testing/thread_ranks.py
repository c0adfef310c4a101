"""Ranks as threads of one process: nothing to start, for the inner loop of somebody who writes an operator.

    pytest --ranks-backend=threads

A call on four ranks costs some 30 ms more than the work itself, and a debugger or ``print`` works in it. It stands on
PyTorch's own ``multi_threaded_pg``, which is private: where a PyTorch release changed it, the error says so, and the
processes remain. The ranks take turns (:mod:`hyper_parallel.testing.turns`), so that each has its own random numbers
and default dtype; the registry is shared. Sums over ranks are added in another order, so the last run before a release
needs processes.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel import torch_compat
from hyper_parallel.comm import trace as comm_trace
from hyper_parallel.dispatch import dispatcher
from hyper_parallel.sharding import mesh
from hyper_parallel.testing import placing, progress
from hyper_parallel.testing.failures import RankFailure, RanksFailed, RanksSkipped, RanksTimedOut, described
from hyper_parallel.testing.messages import is_monkeypatch
from hyper_parallel.testing.turns import Turns

__all__ = ["run_on_threads"]

GRACE = 2.0
"""Seconds that the other ranks get to end after one has failed."""


class _PerThread(threading.local):
    """A value for each thread, made when a thread first asks for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.value = make()


class _ListPerThread:
    """Looks like one list to its users, and is another one in each thread."""

    def __init__(self) -> None:
        self._own = _PerThread(list)

    def __bool__(self) -> bool:
        return bool(self._own.value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own.value)

    def append(self, item: Any) -> None:
        self._own.value.append(item)

    def remove(self, item: Any) -> None:
        self._own.value.remove(item)


class _DictPerThread:
    """The same for a dict."""

    def __init__(self) -> None:
        self._own = _PerThread(dict)

    def get(self, key: Any) -> Any:
        return self._own.value.get(key)

    def __getitem__(self, key: Any) -> Any:
        return self._own.value[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own.value[key] = value

    def values(self) -> Any:
        return self._own.value.values()

    def clear(self) -> None:
        self._own.value.clear()


def run_on_threads(
    n: int, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, timeout: float
) -> list[Any]:
    """What ``fn(*args, **kwargs)`` returns on each of ``n`` ranks; every rank gets its own copy of the arguments.

    Args:
        timeout: seconds until ranks that have not returned are given up.

    Raises:
        RanksFailed: a rank raised; the message has the traceback of each failing rank.
        RanksTimedOut: (a RanksFailed) a rank did not return in time.
        RanksSkipped: no rank failed, and at least one asked for a skip.
        RuntimeError: there is a process group in this process already, or PyTorch's threaded one cannot be used.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already; ranks as threads need one without")
    ranks = [_RankThread(number, n, fn, args, kwargs or {}) for number in range(n)]
    turns = Turns()
    with _threaded_world(turns) as group:
        store = dist.HashStore()  # type: ignore[attr-defined]
        for rank in ranks:
            rank.start(store, timeout, group.exception_handle, turns)
        deadline = time.monotonic() + timeout
        for rank in ranks:
            rank.thread.join(max(0.0, deadline - time.monotonic()))
            if rank.failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
        late = [rank for rank in ranks if rank.thread.is_alive()]
        stacks = {rank.number: rank.stack() for rank in late}
        if late:
            group.exception_handle(TimeoutError())  # ends those that wait in a collective; others cannot be ended
            turns.stop()
        for rank in late:
            rank.thread.join(GRACE)
    return _judged(ranks, stacks, timeout)


class _RankThread:
    """One rank: its thread, and how it ended."""

    def __init__(self, number: int, world_size: int, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.number, self.world_size = number, world_size
        # One monkeypatch for all: ranks change the same process, and it undoes their changes last to first.
        shared = {id(value): value for value in [*args, *kwargs.values()] if is_monkeypatch(value)}
        self._fn, self._arguments = fn, copy.deepcopy((tuple(args), dict(kwargs)), shared)
        self.value: Any = None
        self.failure: RankFailure | None = None
        self.skip: str | None = None
        self.is_cancelled = False

    def start(self, store: Any, timeout: float, cancel_others: Callable[[BaseException], None], turns: Turns) -> None:
        self.thread = threading.Thread(
            target=self._run, args=(store, timeout, cancel_others, turns), name=f"rank{self.number}", daemon=True
        )
        self.thread.start()

    def _run(self, store: Any, timeout: float, cancel_others: Callable[[BaseException], None], turns: Turns) -> None:
        try:
            dist.init_process_group(
                "threaded",
                rank=self.number,
                world_size=self.world_size,
                store=store,
                timeout=timedelta(seconds=timeout),
            )
            args, kwargs = self._arguments
            with turns.taken():
                self.value = self._fn(*args, **kwargs)
        except SystemExit:  # how a collective ends when another rank has failed
            self.is_cancelled = True
        except BaseException as error:  # pytest's outcomes too
            if isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped":
                self.skip = str(error)
            else:
                self.failure = described(error)
            cancel_others(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def stack(self) -> str:
        """Where the thread is, after what it is busy with."""
        assert self.thread.ident is not None
        frame = sys._current_frames().get(self.thread.ident)
        return "\n".join([progress.of_thread(self.thread.ident), "".join(traceback.format_stack(frame))])


def _judged(ranks: Sequence[_RankThread], stacks: Mapping[int, str], timeout: float) -> list[Any]:
    failures = {rank.number: rank.failure for rank in ranks if rank.failure is not None}
    cancelled = sum(rank.is_cancelled for rank in ranks)
    if failures:
        note = f"{cancelled} more were waiting in a collective and were stopped" if cancelled else ""
        raise RanksFailed(len(ranks), failures, note)
    if stacks:
        finished = [rank.number for rank in ranks if rank.number not in stacks]
        raise RanksTimedOut(len(ranks), timeout, stacks, finished)
    skips = [rank.skip for rank in ranks if rank.skip is not None]
    if skips:
        raise RanksSkipped(skips[0])
    return [rank.value for rank in ranks]


@contextmanager
def _threaded_world(turns: Turns) -> Iterator[Any]:
    """PyTorch's world, and the state of ours that ranks must not share, one per thread; gives the class of groups."""
    try:
        parts = torch_compat.threaded_groups()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no threaded process group as this version of hyper_parallel knows it "
            f"({error}); use --ranks-backend=processes"
        ) from error
    with ExitStack() as stack:
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # which every rank wraps once more
        parts.isolate(True)
        stack.callback(parts.isolate, False)
        parts.install()
        stack.callback(parts.uninstall)
        parts.group.reset()
        stack.callback(parts.group.reset)
        # Where ranks wait for each other: in a collective, and when they make a group.
        module, barrier = parts.module, "_store_based_barrier"
        for owner, name in ((module.Collective, "join"), (module, barrier), (dist.distributed_c10d, barrier)):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, turns.passing(getattr(owner, name)))
        stack.enter_context(comm_trace.per_thread(_ListPerThread(), threading.local()))
        for per_world in (mesh._INFOS, placing._meshes):  # keep nothing of a world that is over
            stack.callback(per_world.clear)
        rules = dispatcher._rules
        dispatcher._rules = _DictPerThread()  # type: ignore[assignment]
        stack.callback(setattr, dispatcher, "_rules", rules)
        yield parts.group
