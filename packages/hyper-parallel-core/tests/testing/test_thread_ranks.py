"""Ranks as threads: what a call gives, that ranks share nothing they must not share, and how it ends when one fails."""

import random
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import CommTrace, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.dispatch import dispatcher
from hyper_parallel.plugins import PluginManager
from hyper_parallel.registry import Registry, use_registry
from hyper_parallel.testing import RanksFailed, RanksSkipped, check_op, tensor
from hyper_parallel.testing.failures import RanksTimedOut
from hyper_parallel.testing.thread_ranks import run_on_threads


def ranks(n, fn, *args, timeout=60.0, **kwargs):
    return run_on_threads(n, fn, args, kwargs, timeout=timeout)


@pytest.fixture
def rules(tmp_path):
    table = tmp_path / "rules.yaml"
    table.write_text(
        "__default__: {distributed_op_module: hyper_parallel.rules, distributed_op_class: Elementwise}\n"
        "exp: {}\nmul: {params: {linear: each}}\nneg: {params: {linear: first}}\n"
    )
    registry = Registry(PluginManager([], {}), {})
    registry.load_table(table)
    with use_registry(registry):
        yield


def gather(values):
    values.append(dist.get_rank())  # each rank has its own copy
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0), Shard(1)])
    with CommTrace() as trace:
        whole = x.full_tensor()
    return values, whole.tolist(), dict(trace.counts), mesh.get_local_rank("tp")


def test_each_rank_has_its_world_its_arguments_and_its_trace():
    found = ranks(4, gather, [])
    assert [values for values, *_ in found] == [[0], [1], [2], [3]]
    assert [tp for *_, tp in found] == [0, 1, 0, 1]
    for _, whole, counts, _ in found:
        assert whole == torch.arange(10.0).view(5, 2).tolist()
        assert counts == {"all_gather": 1}
    assert not dist.is_initialized()


def test_operator_conforms_on_threads_as_on_processes(rules):
    check_op(ranks, torch.mul, tensor(5, 6), tensor(6), meshes=((2,), (2, 2)), max_layouts=20)


def numbers():
    return torch.randn(3).tolist(), torch.nn.Linear(2, 2).weight.tolist(), torch.randperm(9).tolist()


def test_every_rank_draws_the_same_numbers():
    found = ranks(3, numbers)
    assert found[0] == found[1] == found[2] == ranks(3, numbers)[0]


def numbers_of_its_own(mesh_size):
    """Draws and collectives in turn, from a seed and a default dtype that differ by rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (mesh_size,))
    torch.manual_seed(rank)
    random.seed(rank)
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    found = []
    for _ in range(3):
        dist.barrier(mesh.get_group())
        found += [*torch.nn.functional.dropout(torch.ones(4)).tolist(), random.random()]
        state = torch.get_rng_state()
        dist.barrier(mesh.get_group())
        assert torch.equal(state, torch.get_rng_state())
    return found, torch.get_default_dtype()


def numbers_of_one_process(rank):
    torch.manual_seed(rank)
    drawn = random.Random(rank)
    kept = [(torch.nn.functional.dropout(torch.ones(4)).tolist(), drawn.random()) for _ in range(3)]
    return [number for numbers, last in kept for number in [*numbers, last]]


def test_generators_and_default_dtype_are_those_of_the_rank():
    outside = torch.get_rng_state(), random.getstate()
    found = ranks(3, numbers_of_its_own, 3)
    assert torch.equal(outside[0], torch.get_rng_state())
    assert random.getstate() == outside[1]
    assert [dtype for _, dtype in found] == [torch.float32, torch.float64, torch.float64]
    for rank, (numbers_, _) in enumerate(found):
        assert numbers_ == numbers_of_one_process(rank)


def plans():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    x.exp()
    x.neg()
    return dispatcher.plans_made()


def test_plans_are_counted_per_rank_and_forgotten_afterwards(rules):
    before = dispatcher.plans_made()
    assert ranks(2, plans) == [2, 2]
    assert dispatcher.plans_made() == before


def raise_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.barrier()


def test_failing_rank_is_named_and_the_others_do_not_wait():
    with pytest.raises(
        RanksFailed, match=r"(?s)1 of 3 ranks failed\n--- rank 1 ---.*ValueError: no\n2 more were waiting"
    ) as e:
        ranks(3, raise_on_rank_one)
    assert e.value.failures[1].type_name == "ValueError"
    assert ranks(2, dist.get_world_size) == [2, 2], "the next call starts afresh"


def skip_on_rank_one():
    if dist.get_rank() == 1:
        pytest.skip("not today")


class Patched:
    value = "as it is"


def patch(monkeypatch):
    monkeypatch.setattr(Patched, "value", "patched")
    return Patched.value


def test_what_several_ranks_have_patched_is_undone():
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run_on_threads(3, patch, (monkeypatch,), timeout=60) == ["patched"] * 3
    assert Patched.value == "as it is"


def test_skip_is_a_skip():
    with pytest.raises(RanksSkipped, match="not today"):
        ranks(2, skip_on_rank_one)


def join_not_all():
    if dist.get_rank() == 0:
        dist.barrier()


def test_rank_that_waits_for_ever_is_given_up():
    with pytest.raises(RanksTimedOut, match=r"rank 0 of 2 did not return within 0.5 s"):
        ranks(2, join_not_all, timeout=0.5)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("rank")] == []


def test_process_with_a_group_of_its_own_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="has a process group already"):
            ranks(2, dist.get_rank)
    finally:
        dist.destroy_process_group()


def test_option_runs_the_ranks_of_a_test_as_threads(tmp_path):
    test = tmp_path / "test_threads.py"
    test.write_text(
        "import os, pytest, threading, torch.distributed as dist\n"
        "def name(): return threading.current_thread().name, os.getpid()\n"
        "def test_fixture(ranks):\n"
        "    assert ranks(2, name) == [('rank0', os.getpid()), ('rank1', os.getpid())]\n"
        "@pytest.mark.ranks(2)\n"
        "def test_marker(): assert dist.get_world_size() == 2\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--ranks-backend=threads", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
