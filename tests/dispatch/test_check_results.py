"""``check_results()``: a running program is told which operator, or which remembered form, is not what it states."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from hyper_parallel import (
    CommTrace,
    DTensor,
    Partial,
    Replicate,
    ResultCheckError,
    Shard,
    check_results,
    init_device_mesh,
)
from hyper_parallel.rules import FunctionOp, wrap
from hyper_parallel.testing import make
from hyper_parallel.testing.function_operators import distributed

R, P = Replicate(), Partial()


def mesh2():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


class Wrong(FunctionOp):
    """Wraps something that is not what the spec of its argument states."""

    def __init__(self, op_name, *, change):
        super().__init__(op_name)
        self.change = change

    def run(self, func, args, kwargs):
        return wrap(self.change(args[0].to_local()), args[0].spec)


@distributed(Wrong, change=lambda x: torch.cat([x, x], 1)[:, : x.shape[1]])
def leaves_a_gap(x):
    return x * 1


@distributed(Wrong, change=lambda x: x.half())
def rounds(x):
    return x * 1


@distributed(Wrong, change=lambda x: x[:1])
def drops_rows(x):
    return x * 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (leaves_a_gap, r"leaves_a_gap: the local tensor of a result has stride \(10, 1\), stated \(5, 1\)"),
        (rounds, r"rounds: .* has dtype torch\.float16, stated torch\.float64"),
        (drops_rows, r"drops_rows: .* has shape \(1, 5\), stated \(2, 5\)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_result_that_is_not_what_it_states_is_told_with_its_operator(function, text):
    x = make(torch.randn(4, 5, dtype=torch.float64), mesh2(), [Shard(0)])
    function(x)
    with check_results(), pytest.raises(ResultCheckError, match=text) as caught:
        function(x)
    assert caught.value.op_name == function.__name__
    assert caught.value.layouts == (x.layout,)
    assert "(4, 5) of float64 with stride (5, 1)" in str(caught.value)
    function(x)


@pytest.mark.ranks(2)
def test_a_tensor_of_unknown_origin_is_told_at_its_first_use():
    x = make(torch.randn(4, 5), mesh2(), [Shard(0)])
    x._local = torch.zeros(5, 2).t()
    with check_results(), pytest.raises(ResultCheckError, match=r"exp: the local tensor of a result has|an argument"):
        x.exp()


def write_unseen(local: torch.Tensor) -> None:
    """Write as a foreign kernel does: the version counter stays."""
    ctypes.memset(local.data_ptr(), 0, local.numel() * local.element_size())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("written_on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_a_stale_form_is_found_on_every_rank(written_on):
    x = make(torch.rand(4, 5) + 1, mesh2(), [P])
    first = x.exp()  # carries the sum out, and keeps it
    if x.layout.info.my_coordinate()[0] in written_on:
        write_unseen(x._local)
    assert x.exp().full_tensor().equal(first.full_tensor()), "nothing is kept, so that nothing is stale"
    with (
        check_results(),
        pytest.raises(ResultCheckError, match=r"a remembered form .*is not what would be computed now"),
    ):
        x.exp()


@pytest.mark.ranks(2)
def test_a_stale_gathered_value_is_found_when_a_use_as_varying_starts_from_before():
    x = make(torch.rand(4, 5) + 1, mesh2(), [Shard(0)], requires_grad=True)
    weight = make(torch.rand(5, 6), mesh2(), [Shard(1)])
    whole = x.redistribute(placements=[R])
    write_unseen(whole._local)
    with check_results(), pytest.raises(ResultCheckError, match=r"a remembered form \(S\(0\) -> R\)"):
        whole @ weight


@pytest.mark.ranks(2)
def test_what_is_right_passes_and_is_as_without():
    def step():
        torch.manual_seed(0)
        x = make(torch.rand(4, 6), mesh2(), [Shard(0)], requires_grad=True)
        weights = [make(torch.rand(6, 8), mesh2(), [Shard(1)], requires_grad=True) for _ in range(3)]
        whole = x.redistribute(placements=[R])
        hidden = [torch.relu(whole @ w) for w in weights]
        back = [make(torch.rand(8, 6), mesh2(), [Shard(0)], requires_grad=True) for _ in range(3)]
        out = sum(h @ w for h, w in zip(hidden, back, strict=True))
        out.softmax(-1).square().sum().backward()
        return [t.grad.full_tensor() for t in (x, *weights, *back)]

    with CommTrace() as trace:
        before = step()
    counted = trace.counts
    with check_results(), check_results():
        during = step()
    for a, b in zip(before, during, strict=True):
        torch.testing.assert_close(a, b)
    with CommTrace() as trace:
        step()
    assert trace.counts == counted


@pytest.mark.ranks(2)
def test_nothing_is_left_behind():
    plain = DTensor.__dict__["__torch_function__"]
    with pytest.raises(ZeroDivisionError):
        fail_inside(plain)
    assert DTensor.__dict__["__torch_function__"] is plain


def fail_inside(plain):
    with check_results():
        assert DTensor.__dict__["__torch_function__"] is not plain
        raise ZeroDivisionError


PROGRAM = """
import torch
from hyper_parallel import DTensor, Replicate, init_device_mesh
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
x = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (1,)), [Replicate()])
x._local = torch.ones(3, 2)
x.exp()
"""


def test_the_environment_turns_it_on_for_a_program():
    def run(value: str) -> str:
        environment = {**os.environ, "HYPER_PARALLEL_CHECK": value}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        return done.stderr

    assert "ResultCheckError" not in run("0")
    assert "ResultCheckError: exp: the local tensor" in run("1")
