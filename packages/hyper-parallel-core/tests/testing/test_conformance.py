"""The conformance kit: it passes right rules and finds wrong ones.

The operators are functions of this module with rules of their own, so that no op pack is needed and none is disturbed.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import Partial, Replicate, Shard, Strategy
from hyper_parallel._rules.families.contraction import Linear
from hyper_parallel._rules.families.elementwise import Elementwise
from hyper_parallel._rules.families.views import Reshape
from hyper_parallel._rules.strategy import R, S
from hyper_parallel.testing import OpConformance, make, mesh_of, sample, tensor
from hyper_parallel.testing.drawing import InputSpace, smallest
from hyper_parallel.testing.function_operators import StrategyFunctionOp, distributed
from hyper_parallel.testing.inputs import Sample
from hyper_parallel.testing.layouts import axis_placements, tensor_placements

SRC = Path(__file__).parents[2] / "src"
ONE = ((2,),)


# -- right rules ----------------------------------------------------------------------------------------------------


@distributed(Elementwise)
def right_exp(x, out=None):
    return torch.exp(x, out=out)


@distributed(Elementwise)
def right_exp_(x):
    return x.exp_()


@distributed(Elementwise, linear="sum")
def right_add(x, y):
    return x + y


@distributed(Linear)
def right_linear(input, weight, bias=None):
    return torch.nn.functional.linear(input, weight, bias)


@distributed(Reshape)
def right_view(x, *sizes):
    return x.view(sizes)


@distributed(
    StrategyFunctionOp,
    rows=lambda call: [Strategy([S(0)], (S(0), R)), Strategy([S(1)], (S(1), R))],
    num_outputs=lambda c: 2,
)
def right_with_shape(x):
    return x * 2, torch.zeros((), dtype=x.dtype)


class TestRightExp(OpConformance):
    op = right_exp
    samples = (sample(tensor(4, 6)), sample(tensor(5, 1)), sample(tensor()))
    inplace = right_exp_
    out = True
    max_collectives = staticmethod(lambda layouts: {"all_reduce": 1} if layouts[0].is_partial() else {})


class TestRightAdd(OpConformance):
    op = right_add
    samples = (sample(tensor(4, 6), tensor(6)), sample(tensor(3, 1), tensor(3, 5, dtype=torch.float32)))
    max_layouts = 30


class TestRightLinear(OpConformance):
    op = right_linear
    samples = (sample(tensor(3, 4), tensor(5, 4), bias=tensor(5)),)
    max_layouts = 30


class TestRightView(OpConformance):
    op = right_view
    samples = (sample(tensor(4, 6), 2, 12), sample(tensor(4, 3), 12))
    meshes = ((2, 2),)


class TestComposite(OpConformance):
    """A function of several operators is tested like one, without strategies."""

    op = lambda x, w: right_exp(right_linear(x, w))  # noqa: E731
    samples = (sample(tensor(3, 4), tensor(2, 4)),)
    meshes = ONE


class TestGap(OpConformance):
    """A known failure is a strict xfail."""

    op = lambda x: x.transpose(0, 1).relu6()  # noqa: E731
    reference = staticmethod(lambda x: x)
    samples = (sample(tensor(2, 2)).options(name="whole", gap="not the same function"), sample(tensor(3, 3)))
    gaps = {"3x3-*": "nor here"}  # noqa: RUF012
    meshes = ONE


# -- what is tried --------------------------------------------------------------------------------------------------


def test_every_layout_of_a_matrix():
    on_axis = axis_placements((4, 6), with_partial=True)
    assert [str(type(p).__name__) for p in on_axis] == [
        "Replicate",
        "Shard",
        "Shard",
        "Partial",
        "PackedShard",
        "PackedShard",
    ]
    on_two = tensor_placements((4, 6), 2, with_partial=True)
    assert len(on_two) == len(set(on_two)) == 36  # 6 x 6, less two packed shards of one dim, plus two swapped orders
    assert sum(p.swapped for p in on_two) == 2
    assert tensor_placements((), 1, with_partial=False)[0].placements == (Replicate(),)


def space(*shapes, mesh_ndim=2, pending=True, grad=True):
    return InputSpace(shapes, (pending,) * len(shapes), (grad,) * len(shapes), mesh_ndim)


def test_few_layouts_are_all_tried():
    cases = space((4, 6), mesh_ndim=1).cases(32, "seed")
    assert [c.inputs[0].placements for c in cases] == [p.placements for p in tensor_placements((4, 6), 1, True)]
    assert {c.inputs[0].grad for c in cases} == {True, False}


def test_many_layouts_are_drawn_the_same_each_time_up_to_the_limit():
    one = InputSpace(((4, 6), (6,)), (True, False), (True, False), 2)
    first = one.cases(20, "seed")
    assert len(first) == len(set(first)) == 20
    assert first == one.cases(20, "seed")
    assert first != one.cases(20, "another")
    assert all(not c.inputs[1].grad and Partial() not in c.inputs[1].placements for c in first)


def test_cases_differ_in_all_that_the_kit_promises():
    inputs = [placed for case in space((4, 6), (6,)).cases(60, "seed") for placed in case.inputs]
    assert {p.grad for p in inputs} == {p.transposed for p in inputs} == {True, False}
    assert any(p.varying for p in inputs)
    assert any(p.swapped for p in inputs)
    kinds = {type(p).__name__ for placed in inputs for p in placed.placements}
    assert kinds == {"Replicate", "Shard", "Partial", "PackedShard"}


def test_failing_case_shrinks_to_what_matters():
    case = smallest(space((4, 6), (6,)).strategy(), lambda c: Shard(1) in c.inputs[0].placements, "seed")
    assert [str(p) for p in case.inputs] == ["R,S(1)", "R,R"]
    assert smallest(space((4,)).strategy(), lambda c: False, "seed") is None


def test_sample_fills_nested_arguments():
    one = sample([tensor(2), tensor(3)], dim=0, weight=torch.ones(1)).options(name="three")
    assert isinstance(one, Sample)
    assert one.id == "three"
    args, kwargs = one.arguments(one.values())
    assert [t.shape for t in args[0]] == [(2,), (3,)]
    assert kwargs["dim"] == 0
    assert kwargs["weight"].item() == 1
    assert sample(tensor(4, 6, dtype=torch.int64), dim=-1).id == "4x6_int64--1"


def test_names_and_reproduction_in_pytest(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "from hyper_parallel import StrategyOp, Strategy\n"
        "from hyper_parallel._rules.strategy import S\n"
        "from hyper_parallel.testing import OpConformance, sample, tensor\n"
        "class Softmax(StrategyOp):\n"
        "    def strategies(self, call):\n"
        "        yield Strategy([S(0)], S(0))\n"
        "Softmax('torch.hann_window')  # any name\n"
        "from hyper_parallel import register_distributed_op\n"
        "register_distributed_op('torch.softmax', Softmax('softmax_of_test'), override=True)\n"
        "class TestSoftmax(OpConformance):\n"
        "    op = torch.softmax\n"
        "    samples = [sample(tensor(4, 6), dim=0), sample(tensor(4, 6), dim=0).options(gap='wrong')]\n"
        "    meshes = [(2,)]\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "test_it.py"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    out = result.stdout
    assert "1 failed, 1 xfailed" in out, out
    assert "FAILED test_it.py::TestSoftmax::test_layouts[4x6-0-0-2]" in out
    program = out[out.index("# torchrun") : out.index("print(dist.get_rank(), out)")]
    assert "x0 = make(tensor(4, 6, dtype=torch.float64).draw(0), mesh, [Shard(0)], requires_grad=True)" in program
    assert "out = torch.softmax(x0, dim=0)" in program
    compile("\n".join(line.removeprefix("    ") for line in program.splitlines()), "program", "exec")


# -- pending inputs -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64], ids=str)
def test_terms_of_whole_numbers_sum_to_them_in_any_order(dtype):
    """Elements that are equal on one device stay so, and the first of the largest is the same one."""
    value = torch.tensor([[1.0, 3.0, 3.0], [3.0, 0.0, 3.0], [2.0, 3.0, 1.0]]).to(dtype)
    local = make(value, mesh_of((4,)), [Partial()]).to_local()
    terms = [torch.empty_like(local) for _ in range(4)]
    dist.all_gather(terms, local)
    assert not torch.equal(terms[0], value)
    for order in itertools.permutations(terms):
        assert torch.equal(sum(order), value)
