"""A pool of gloo ranks on this machine that stays alive between calls.

Starting a rank costs an import of torch; running a function on ranks that exist costs about a millisecond.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from typing import Any

from hyper_parallel.testing.failures import RankFailure, RanksFailed, RanksSkipped, RanksTimedOut, name_ranks
from hyper_parallel.testing.messages import RAISED, RETURNED, SKIPPED, Reply, make_task
from hyper_parallel.testing.worker import HOST, WorkerSetup, main

START_TIMEOUT = 120.0
"""Seconds until a new rank must have joined its process group."""
GRACE = 2.0
"""Seconds that the other ranks get to end as well after one rank has failed."""
MAX_GROUPS = 128
"""Process groups (each with its own threads and sockets) a rank may collect before the pool is started afresh."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class WorkerPool:
    """``world_size`` processes with an initialised gloo process group. They start on the first call.

    Args:
        world_size: number of ranks.
        timeout: seconds until a collective that not all ranks join raises. A call has its own, see `run`.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.collective_timeout = timeout
        self._ranks: list[_RankProcess] = []
        self._folder: str | None = None
        self._owner = os.getpid()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return what each one returned, by rank.

        ``fn`` is a module-level function, or a method of a module-level test class. Arguments and results are pickled;
        torch's random state is that of ``torch.manual_seed(0)`` on every rank. What ranks print is printed here.

        Ranks live on after the call. Undone for the next one are: what ``fn`` changed through pytest's ``monkeypatch``
        (as an argument, of which each rank gets one of its own), environment variables, the working directory,
        ``sys.path``, random states, and torch's grad mode, default dtype and device, number of threads, deterministic
        algorithms and anomaly detection. Whatever else ``fn`` changes in a module stays: it has to restore that itself.

        Args:
            timeout: seconds until ranks that have not returned are stopped; ``fn`` does not see this argument.

        Raises:
            RanksFailed: a rank raised or died; its message has the traceback of each failing rank.
            RanksTimedOut: (a RanksFailed) a rank did not return in time; its message has the rank's stacks.
            RanksSkipped: no rank failed, and at least one asked for a skip.
            NotSendableError: (a TypeError) ``fn`` or an argument cannot be sent to another process.
        """
        return self.call(fn, args, kwargs, timeout=timeout)

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, timeout: float
    ) -> list[Any]:
        """`run` for functions that have a ``timeout`` argument of their own."""
        task = pickle.dumps(make_task(fn, args, kwargs))
        if not all(rank.process.is_alive() for rank in self._ranks):
            self.stop()
        if not self._ranks:
            self._start()
        try:
            for rank in self._ranks:
                rank.send(task)
            replies = self._collect(timeout)
            self._print_output()
            return self._judge(replies, timeout)
        except (RanksFailed, RanksSkipped):
            raise
        except BaseException:  # e.g. Ctrl-C: nobody knows what the ranks are doing
            self.stop()
            raise

    def stop(self) -> None:
        """End the ranks and remove their files. The next call starts them again."""
        if os.getpid() != self._owner:  # the atexit call of a forked child, which has a copy of this pool
            return
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self.stop)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _start(self) -> None:
        atexit.register(self.stop)
        self._folder = tempfile.mkdtemp(prefix="hyper_parallel_ranks_")
        context = _fork_server()
        try:
            for number in range(self.world_size):
                self._ranks.append(_RankProcess.start(context, self._setup(number)))
            deadline = time.monotonic() + START_TIMEOUT
            port = self._ranks[0].receive(deadline)
            for rank in self._ranks:
                rank.send(pickle.dumps(port))
            for rank in self._ranks:
                rank.receive(deadline)
            for rank in self._ranks:
                rank.read_output()  # what gloo says at start belongs to no test
        except BaseException as exc:
            output = "".join(rank.read_output() for rank in self._ranks)
            self.stop()
            if not isinstance(exc, Exception):
                raise
            raise RuntimeError(f"could not start {self.world_size} gloo ranks: {exc!r}\n{output}") from exc

    def _setup(self, number: int) -> WorkerSetup:
        assert self._folder is not None
        environment = dict(os.environ) | _ONE_THREAD
        environment |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(self.world_size)}
        environment["MASTER_ADDR"] = HOST
        # gloo would look up the host's own name, which on many machines is slow or leads nowhere.
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return WorkerSetup(
            rank=number,
            world_size=self.world_size,
            collective_timeout=self.collective_timeout,
            environment=environment,
            log_file=os.path.join(self._folder, f"rank{number}.log"),
            stacks_file=os.path.join(self._folder, f"rank{number}.stacks"),
        )

    def _collect(self, timeout: float) -> dict[int, Reply]:
        """The replies that arrive in time; once a rank has failed, the others get only `GRACE` to follow."""
        waiting: dict[object, _RankProcess] = {rank.conn: rank for rank in self._ranks}
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = connection.wait(
                [rank.conn for rank in waiting.values()], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for conn in ready:
                rank = waiting.pop(conn)
                reply = replies[rank.number] = rank.reply()
                if reply.kind != RETURNED:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return replies

    def _judge(self, replies: Mapping[int, Reply], timeout: float) -> list[Any]:
        failures = {number: reply.failure for number, reply in replies.items() if reply.kind == RAISED}
        skips = [reply.failure.message for reply in replies.values() if reply.kind == SKIPPED]
        late = [rank for rank in self._ranks if rank.number not in replies]
        stacks = _dump_stacks(late)
        if late and not failures and not skips:
            self.stop()
            raise RanksTimedOut(self.world_size, timeout, stacks, sorted(replies))
        if late or not _agree(replies.values()) or max(reply.groups for reply in replies.values()) > MAX_GROUPS:
            # Ranks that parted ways leave half-done collectives behind, which the next test would fall over.
            self.stop()
        if failures:
            note = ""
            if late:
                note = f"{name_ranks([rank.number for rank in late])} had not ended {GRACE:g} s later and were stopped"
                note = "\n".join([note, *(f"--- rank {r} was here ---\n{text.rstrip()}" for r, text in stacks.items())])
            raise RanksFailed(self.world_size, failures, note)
        if skips:
            raise RanksSkipped(skips[0])
        return [pickle.loads(reply.value) for _, reply in sorted(replies.items())]

    def _print_output(self) -> None:
        for rank in self._ranks:
            for line in rank.read_output().splitlines():
                if not line.startswith("[Gloo] Rank"):  # said for each new group, and of no interest
                    print(f"[rank {rank.number}] {line}")


@dataclass
class _RankProcess:
    """The test process's end of one rank."""

    number: int
    process: Any
    conn: connection.Connection
    setup: WorkerSetup
    pid: int = field(init=False)
    _output_read: int = 0

    @classmethod
    def start(cls, context: Any, setup: WorkerSetup) -> _RankProcess:
        ours, theirs = context.Pipe()
        process = context.Process(target=main, args=(setup, theirs), name=f"rank{setup.rank}", daemon=True)
        process.start()
        theirs.close()  # so that the end of the process ends the pipe
        rank = cls(setup.rank, process, ours, setup)
        rank.pid = process.pid
        return rank

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the rank is dead: reading from it says so
            self.conn.send_bytes(data)

    def receive(self, deadline: float) -> Any:
        if not self.conn.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {self.number} did not answer in time")
        return pickle.loads(self.conn.recv_bytes())

    def reply(self) -> Reply:
        try:
            reply: Reply = pickle.loads(self.conn.recv_bytes())
            return reply
        except (EOFError, ConnectionError):
            self.process.join(GRACE)
            code = self.process.exitcode
            if code is not None and code < 0:
                text = f"the process was ended by {signal.Signals(-code).name}"
            else:
                text = f"the process ended with exit code {code}"
            with open(self.setup.stacks_file, encoding="utf-8") as file:
                message = f"{file.read().rstrip()}\n{text}".lstrip()
            return Reply(RAISED, failure=RankFailure("died", message, f"{text}\n{self.read_output()}"))

    def read_output(self) -> str:
        """What the rank has printed since the last call."""
        try:
            with open(self.setup.log_file, encoding="utf-8", errors="replace") as file:
                file.seek(self._output_read)
                text = file.read()
                self._output_read = file.tell()
        except FileNotFoundError:  # it ended before it opened its log
            return ""
        return text

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.conn.close()


def _agree(replies: Iterable[Reply]) -> bool:
    """Whether all ranks ended in the same way, and so left the process groups in the same state."""
    return len({(reply.kind, reply.failure.type_name) for reply in replies}) == 1


def _dump_stacks(ranks: Sequence[_RankProcess]) -> dict[int, str]:
    for rank in ranks:
        if rank.process.is_alive():
            os.kill(rank.pid, signal.SIGUSR1)
    stacks = {}
    for rank in ranks:
        threads = _read_when_quiet(rank.setup.stacks_file).split("\n\n")  # before them, what the rank is busy with
        own = "in wait_for_the_end_of_the_parent"  # the worker's watchdog, which the reader need not see
        stacks[rank.number] = "\n\n".join(thread for thread in threads if own not in thread)
    return stacks


def _read_when_quiet(path: str, patience: float = 3.0) -> str:
    """The text of a file that another process is writing, once it stops growing."""
    deadline = time.monotonic() + patience
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        with open(path, encoding="utf-8", errors="replace") as file:
            latest = file.read()
        if latest == text and "most recent call first" in latest:
            break
        text = latest
    return text or "(it gave no stacks)\n"


def _fork_server() -> Any:
    """A multiprocessing context whose processes are forked from a server that holds torch and runs one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hyper_parallel.testing.preload"])
    # The server takes its environment from here when it starts: the number of threads is fixed when torch is imported,
    # and PYTHONPATH gives it this process's sys.path.
    changes = _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context
