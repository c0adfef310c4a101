"""Pytest plugin: tests on several gloo ranks. Registered as an entry point, so it imports no torch until a test runs.

Two ways to use it::

    def test_sum(ranks):                      # the function runs on 4 ranks, the test judges what they return
        assert ranks(4, local_sum) == [10] * 4

    @pytest.mark.ranks(4)                     # the test's own body runs on each of 4 ranks
    def test_all_reduce():
        ...

The ranks are processes that stay alive for the whole run, one pool per number of ranks. With
``--ranks-backend=threads`` they are threads of the test's own process: nothing to start, and a debugger works
(:mod:`hyper_parallel.testing.thread_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hyper_parallel.testing.pool_set import PoolSet

DEFAULT_TIMEOUT = 120.0
"""Seconds a test on ranks may take."""

_POOLS: pytest.StashKey[PoolSet] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--ranks-backend`` and ``--max-layouts``."""
    group = parser.getgroup("hyper_parallel")
    group.addoption(
        "--max-layouts",
        type=int,
        metavar="N",
        help="at most so many drawn layouts per sample and mesh in conformance tests, for a quick look",
    )
    group.addoption(
        "--ranks-backend",
        choices=("processes", "threads"),
        default="processes",
        help="what the ranks of a test are: gloo processes (default), or threads of this process, for the inner loop",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Document the marker for ``pytest --markers`` and ``--strict-markers``."""
    config.addinivalue_line(
        "markers",
        f"ranks(n, timeout={DEFAULT_TIMEOUT:g}): run the body of the test on each of n gloo ranks, for at most timeout "
        "seconds (hyper_parallel)",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the ranks."""
    pools = config.stash.get(_POOLS, None)
    if pools is not None:
        pools.close()


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Callable[..., list[Any]]:
    """``ranks(n, fn, *args, timeout=120, **kwargs)``: what ``fn(*args, **kwargs)`` returns on each of ``n`` ranks.

    See `hyper_parallel.testing.WorkerPool.run` for what ``fn`` may be and what is raised.
    """

    def run(n: int, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT, **kwargs: Any) -> list[Any]:
        __tracebackhide__ = True
        return _call(pytestconfig, n, fn, args, kwargs, timeout)

    return run


@pytest.fixture(scope="session")
def most_layouts(pytestconfig: pytest.Config) -> int | None:
    """``--max-layouts``."""
    most: int | None = pytestconfig.getoption("--max-layouts")
    return most


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test marked with ``ranks`` on the ranks instead of here."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    n, timeout = _read_marker(marker)
    test = pyfuncitem.obj
    if getattr(test, "is_hypothesis_test", False):
        pytest.fail(
            "@given with @pytest.mark.ranks would draw other examples on each rank: draw in a plain test and send the "
            "example to the ranks with the fixture `ranks`",
            pytrace=False,
        )
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    from hyper_parallel.testing.failures import NotSendableError, RanksFailed

    try:
        _call(pyfuncitem.config, n, test, (), arguments, timeout)
    except (RanksFailed, NotSendableError) as exc:
        pytest.fail(str(exc), pytrace=False)  # a traceback of this process would tell nothing
    return True


def _read_marker(marker: pytest.Mark) -> tuple[int, float]:
    def read(n: int, timeout: float = DEFAULT_TIMEOUT) -> tuple[int, float]:
        return n, timeout

    try:
        return read(*marker.args, **marker.kwargs)
    except TypeError:
        pytest.fail(
            f"@pytest.mark.ranks takes a number of ranks and timeout=, got {marker.args} and {marker.kwargs}",
            pytrace=False,
        )


def _call(
    config: pytest.Config, n: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
) -> list[Any]:
    __tracebackhide__ = True
    from hyper_parallel.testing.failures import RanksSkipped
    from hyper_parallel.testing.pool_set import PoolSet

    if config.getoption("--ranks-backend") == "threads":
        from hyper_parallel.testing.thread_ranks import run_on_threads

        try:
            return run_on_threads(n, fn, args, kwargs, timeout=timeout)
        except RanksSkipped as exc:
            pytest.skip(str(exc))
    if _POOLS not in config.stash:
        config.stash[_POOLS] = PoolSet()
    try:
        return config.stash[_POOLS].call(n, fn, args, kwargs, timeout=timeout)
    except RanksSkipped as exc:
        pytest.skip(str(exc))
