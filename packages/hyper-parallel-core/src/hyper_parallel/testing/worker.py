"""The program of one rank: join the process group, then run tasks until told to stop."""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import unittest
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from typing import Any

from hyper_parallel.testing import progress
from hyper_parallel.testing.failures import RankFailure, described
from hyper_parallel.testing.load import load_call
from hyper_parallel.testing.messages import RAISED, RETURNED, SKIPPED, Reply, ResultPickler, Task, is_monkeypatch

HOST = "127.0.0.1"


@dataclass(frozen=True)
class WorkerSetup:
    """What a rank needs to start. ``collective_timeout`` is in seconds."""

    rank: int
    world_size: int
    collective_timeout: float
    environment: Mapping[str, str]
    log_file: str
    stacks_file: str


def main(setup: WorkerSetup, conn: connection.Connection) -> None:
    """Entry point of the rank's process."""
    _watch_parent(os.path.dirname(setup.log_file))
    _prepare_process(setup)
    _join_process_group(setup, conn)
    environment = dict(os.environ)
    while True:
        message = pickle.loads(conn.recv_bytes())
        if message is None:
            return
        _forget_the_last_call(environment)
        reply = _run(message)
        # The test process reads this rank's output when the reply arrives.
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send_bytes(pickle.dumps(reply))


def _watch_parent(folder: str) -> None:
    """When the test process is gone, remove its files and end, also while this rank is stuck in a collective."""
    parent = parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def wait_for_the_end_of_the_parent() -> None:
        connection.wait([sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait_for_the_end_of_the_parent, daemon=True).start()


def _prepare_process(setup: WorkerSetup) -> None:
    os.environ.clear()
    os.environ.update(setup.environment)
    # Ctrl-C reaches the whole process group; the test process decides what happens to its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = open(setup.log_file, "w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    stacks = open(setup.stacks_file, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    progress.write_to(stacks.fileno())


def _join_process_group(setup: WorkerSetup, conn: connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    store_type = dist.TCPStore  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    timeout = timedelta(seconds=setup.collective_timeout)
    if setup.rank == 0:  # port 0: the system picks a free one, so that no other program can take it in between
        store = store_type(HOST, 0, setup.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        conn.send_bytes(pickle.dumps(store.port))
    port = pickle.loads(conn.recv_bytes())
    if setup.rank != 0:
        store = store_type(HOST, port, setup.world_size, is_master=False, timeout=timeout)
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.world_size, timeout=timeout)
    conn.send_bytes(pickle.dumps(os.getpid()))


def _run(task: Task) -> Reply:
    progress.busy_with("")
    patches: list[Any] = []
    try:
        fn, args, kwargs = load_call(task)
        patches += filter(is_monkeypatch, [*args, *kwargs.values()])
        value = io.BytesIO()
        ResultPickler(value, task.module_files).dump(fn(*args, **kwargs))
    except BaseException as exc:  # SystemExit and pytest's outcomes too: a rank ends only when the pool says so
        if _is_skip(exc):
            return Reply(SKIPPED, failure=RankFailure(type(exc).__qualname__, str(exc), ""), groups=_group_count())
        return Reply(RAISED, failure=described(exc), groups=_group_count())
    finally:
        for patch in patches:
            patch.undo()
    return Reply(RETURNED, value=value.getvalue(), groups=_group_count())


def _forget_the_last_call(environment: Mapping[str, str]) -> None:
    """What one test sets must not reach the next."""
    import torch

    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def _is_skip(exc: BaseException) -> bool:
    outcomes = sys.modules.get("_pytest.outcomes")  # not imported: then nothing can have raised it
    return isinstance(exc, unittest.SkipTest) or (outcomes is not None and isinstance(exc, outcomes.Skipped))


def _group_count() -> int:
    from hyper_parallel import torch_compat

    return torch_compat.group_count()
