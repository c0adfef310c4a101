"""The pool of gloo ranks and its pytest plugin."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.testing import NotSendableError, PoolSet, RanksFailed, RanksSkipped, RanksTimedOut, WorkerPool

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


class Payload:
    def __init__(self, value):
        self.value = value


def describe_rank(scale, *, offset=0):
    import torch.distributed as dist

    return dist.get_rank() * scale + offset, dist.get_world_size()


def all_reduce_rank_numbers():
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total


def draw():
    import torch

    return torch.rand(3)


def leave_settings_behind():
    import torch

    torch.manual_seed(7)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    sys.path.append("left_behind")


def read_settings():
    import torch

    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.zeros(()).device.type,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        os.environ["OMP_NUM_THREADS"],
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
        "left_behind" in sys.path,
    )


class Patched:
    value = "as it is"


def patch(monkeypatch, then="return"):
    assert Patched.value == "as it is"
    monkeypatch.setattr(Patched, "value", "patched")
    monkeypatch.setenv("LEFT_BEHIND", "1")
    if then == "fail":
        raise ValueError(Patched.value)
    return Patched.value


def value_of_patched():
    return Patched.value


def double(payload):
    return Payload(payload.value * 2)


def fail_on(rank, then):
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError(f"no luck on rank {rank}")
    if then == "collective":
        all_reduce_rank_numbers()


def fail_everywhere():
    expected, given = 3, 4
    assert expected == given


def hang():
    time.sleep(1000)


def die():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        print("last words", flush=True)
        os._exit(3)
    all_reduce_rank_numbers()


def skip():
    pytest.skip("not here")


def say(text):
    import torch.distributed as dist

    print(f"{text} {dist.get_rank()}")


def make_groups(count):
    import torch.distributed as dist

    for _ in range(count):
        dist.new_group([0, 1])


def return_lambda():
    return lambda: 0


class TestCalls:
    def test_values_come_back_by_rank(self, pool):
        assert pool.run(describe_rank, 10, offset=1) == [(1, 2), (11, 2)]

    def test_collectives_and_tensors(self, pool):
        assert [t.item() for t in pool.run(all_reduce_rank_numbers)] == [3.0, 3.0]

    def test_classes_of_the_test_module_travel(self, pool):
        results = pool.run(double, Payload(4))
        assert [type(result) for result in results] == [Payload, Payload]
        assert [result.value for result in results] == [8, 8]

    def test_a_function_may_have_a_timeout_of_its_own(self, pool):
        assert pool.call(dict, (), {"timeout": 3}, timeout=60) == [{"timeout": 3}] * 2

    def test_random_state_is_fixed(self, pool):
        first, second = pool.run(draw), pool.run(draw)
        assert all(first[0].equal(other) for other in [*first, *second])

    def test_settings_do_not_reach_the_next_call(self, pool):
        import torch

        before = pool.run(read_settings)
        assert before == [(True, torch.float32, "cpu", 1, False, False, "1", None, os.getcwd(), False)] * 2
        pool.run(leave_settings_behind)
        assert pool.run(read_settings) == before

    def test_each_rank_undoes_what_it_has_patched(self, pool, monkeypatch):
        monkeypatch.setattr(sys, "stdin", open(os.devnull))  # cannot be sent, and is of no concern to the ranks
        pids = pool.run(os.getpid)
        for _ in range(2):
            assert pool.run(patch, monkeypatch) == ["patched"] * 2
            with pytest.raises(RanksFailed, match="ValueError: patched"):
                pool.run(patch, monkeypatch=monkeypatch, then="fail")
        assert pool.run(value_of_patched) == ["as it is"] * 2
        assert pool.run(os.getpid) == pids  # not because they are new ones

    def test_ranks_stay_alive(self, pool):
        pids = pool.run(os.getpid)
        assert pool.run(os.getpid) == pids
        assert all(is_running(pid) for pid in pids)

    def test_output_is_shown_with_the_rank(self, pool, capsys):
        pool.run(say, "hello from")
        assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"

    def test_too_many_process_groups_start_the_pool_afresh(self, pool, monkeypatch):
        monkeypatch.setattr("hyper_parallel.testing.pool.MAX_GROUPS", 3)
        before = pool.run(os.getpid)
        pool.run(make_groups, 3)
        assert set(pool.run(os.getpid)).isdisjoint(before)

    def test_what_cannot_be_sent(self, pool):
        def local():
            pass

        with pytest.raises(NotSendableError, match="move it to the top level"):
            pool.run(local)
        with pytest.raises(NotSendableError, match=r"argument offset of describe_rank, a function"):
            pool.run(describe_rank, 1, offset=local)
        with pytest.raises(RanksFailed, match=r"(?i)can't pickle|can't get local"):
            pool.run(return_lambda)

    def test_world_size_is_checked(self):
        with pytest.raises(ValueError, match="at least 1, got 0"):
            WorkerPool(0)


class TestFailures:
    def test_the_failing_rank_is_named_with_its_traceback(self, pool):
        with pytest.raises(RanksFailed) as caught:
            pool.run(fail_on, 1, then="return")
        assert list(caught.value.failures) == [1]
        assert caught.value.failures[1].type_name == "ValueError"
        assert caught.value.failures[1].message == "no luck on rank 1"
        text = str(caught.value)
        assert "--- rank 1 ---" in text
        assert 'raise ValueError(f"no luck on rank {rank}")' in text
        assert "worker.py" not in text

    def test_others_in_a_collective_are_not_waited_for(self, pool):
        before = pool.run(os.getpid)
        with pytest.raises(RanksFailed, match=r"(?s)no luck on rank 0.*rank 1 had not ended"):
            pool.run(fail_on, 0, then="collective")
        assert set(pool.run(os.getpid)).isdisjoint(before)

    def test_ranks_that_fail_alike_are_shown_once_and_stay(self, pool):
        before = pool.run(os.getpid)
        with pytest.raises(RanksFailed) as caught:
            pool.run(fail_everywhere)
        assert str(caught.value).count("--- ranks 0, 1 ---") == 1
        assert "assert 3 == 4" in str(caught.value)  # pytest's rewriting works in a rank too
        assert pool.run(os.getpid) == before

    def test_a_hang_ends_with_stacks(self, pool):
        with pytest.raises(RanksTimedOut, match=r"ranks 0, 1 of 2 did not return within 1 s") as caught:
            pool.run(hang, timeout=1)
        assert sorted(caught.value.stacks) == [0, 1]
        assert all("in hang" in stack for stack in caught.value.stacks.values())
        assert pool.run(describe_rank, 1) == [(0, 2), (1, 2)]

    def test_a_dead_rank_is_reported_with_its_output(self, pool):
        with pytest.raises(RanksFailed, match=r"(?s)exit code 3.*last words") as caught:
            pool.run(die)
        assert caught.value.failures[1].type_name == "died"
        assert pool.run(describe_rank, 1) == [(0, 2), (1, 2)]

    def test_a_rank_that_died_between_calls_is_replaced(self, pool):
        os.kill(pool.run(os.getpid)[0], 9)
        time.sleep(0.2)
        assert pool.run(describe_rank, 1) == [(0, 2), (1, 2)]

    def test_skip(self, pool):
        with pytest.raises(RanksSkipped, match="not here"):
            pool.run(skip)


class TestLifetime:
    def test_stop_ends_the_ranks_and_removes_their_files(self, pool):
        pids, folder = pool.run(os.getpid), Path(pool._folder)
        assert folder.is_dir()
        pool.stop()
        assert not folder.exists()
        assert not any(is_running(pid) for pid in pids)

    def test_the_least_recently_used_pool_makes_room(self):
        pools = PoolSet(max_alive=2)
        try:
            ones = pools.pool(1).run(os.getpid)
            twos = pools.pool(2).run(os.getpid)
            assert pools.pool(1).run(os.getpid) == ones
            pools.pool(3).run(os.getpid)
            assert not any(is_running(pid) for pid in twos)
            assert pools.pool(1).run(os.getpid) == ones
        finally:
            pools.close()
        assert not is_running(ones[0])

    @pytest.mark.parametrize("ending", ["exit", "kill"])
    def test_no_process_outlives_the_test_process(self, tmp_path, ending):
        script = tmp_path / "script.py"
        script.write_text(
            "import os\n"
            "from hyper_parallel.testing import WorkerPool\n"
            "if __name__ == '__main__':\n"
            "    print(*WorkerPool(2).run(os.getpid), flush=True)\n"
            f"    {'os.kill(os.getpid(), 9)' if ending == 'kill' else 'pass'}\n"
        )
        result = subprocess.run(
            [sys.executable, script], env=environment(), capture_output=True, text=True, timeout=120
        )
        assert result.returncode == (-9 if ending == "kill" else 0), result.stderr
        pids = [int(pid) for pid in result.stdout.split()]
        assert len(pids) == 2
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(is_running(pid) for pid in pids)


class TestPlugin:
    def test_it_imports_no_torch(self, tmp_path):
        code = (
            "import sys, pytest\n"
            "assert pytest.main(['--co', '-q', '-p', 'hyper_parallel.testing.pytest_plugin']) == 5\n"
            "assert 'hyper_parallel.testing.pytest_plugin' in sys.modules\n"
            "assert 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], env=environment(), cwd=tmp_path, check=True, timeout=120)

    def test_both_ways_in_one_run(self, tmp_path):
        """Passing, failing, skipped, unsendable and late tests, in importlib mode and with twice the same file name."""
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "test_it.py").write_text(PLUGIN_TESTS.replace("FOLDER", folder))
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "--import-mode=importlib", "--strict-markers"]
        plugin = ["-p", "no:cacheprovider", "-p", "hyper_parallel.testing.pytest_plugin"]
        result = subprocess.run(
            [*command, *plugin, "a", "b"], env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        out = result.stdout
        assert "10 failed, 12 passed, 4 skipped" in out, out + result.stderr
        for folder in ("a", "b"):
            assert f"PASSED {folder}/test_it.py::test_parametrized[2]" in out
            assert f"PASSED {folder}/test_it.py::TestClass::test_method" in out
            assert f"FAILED {folder}/test_it.py::test_assertion" in out
        assert "assert 1 == 0" in out
        assert "--- rank 1 ---" in out
        assert "argument unsendable of test_unsendable, a generator, cannot be sent to other ranks" in out
        assert "did not return within 1 s" in out
        assert "draw in a plain test" in out
        assert "takes a number of ranks and timeout=" in out
        assert "[rank 0] shown on failure" in out

    def test_returned_classes_of_a_module_with_a_pretended_name(self, tmp_path):
        """The ``pytest`` program, unlike ``python -m pytest``, has no working directory to import parents from."""
        folder = tmp_path / "some-package" / "tests"
        folder.mkdir(parents=True)
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
        (folder / "test_it.py").write_text(
            "class Point:\n"
            "    def __init__(self, x): self.x = x\n"
            "    class Inner: pass\n"
            "def make(): return Point(3), Point, Point.Inner, make\n"
            "def test_it(ranks):\n"
            "    for point, *named in ranks(2, make):\n"
            "        assert type(point) is Point\n"
            "        assert point.x == 3\n"
            "        assert named == [Point, Point.Inner, make]\n"
        )
        program = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
        options = ["-q", "-p", "no:cacheprovider", "-p", "hyper_parallel.testing.pytest_plugin", "some-package/tests"]
        command = [sys.executable, "-c", program, *options]
        done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert "1 passed" in done.stdout, done.stdout + done.stderr


def environment():
    return os.environ | {"PYTHONPATH": str(SRC), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


PLUGIN_TESTS = """
import time

import pytest
from hypothesis import given, strategies


def where():
    return "FOLDER"


def skip():
    pytest.skip("by the fixture")


@pytest.fixture
def unsendable():
    return (i for i in range(3))


def test_fixture(ranks):
    assert ranks(2, where) == ["FOLDER"] * 2


def test_skip_through_fixture(ranks):
    ranks(2, skip)


@pytest.mark.ranks(2)
def test_body():
    import torch.distributed as dist

    assert dist.get_world_size() == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("n", [1, 2])
def test_parametrized(n, tmp_path):
    assert n in (1, 2) and tmp_path.is_dir()


class TestClass:
    @pytest.mark.ranks(2)
    def test_method(self):
        assert where() == "FOLDER"


@pytest.mark.ranks(2)
def test_assertion():
    import torch.distributed as dist

    print("shown on failure")
    assert dist.get_rank() == 0


@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("by the body")


@pytest.mark.ranks(2)
def test_unsendable(unsendable):
    pass


@pytest.mark.ranks(2, timeout=1)
def test_late():
    time.sleep(100)


@pytest.mark.ranks(2)
@given(strategies.integers())
def test_given(n):
    pass


@pytest.mark.ranks(2, 3, 4)
def test_wrong_marker():
    pass


def test_plain():
    pass
"""
