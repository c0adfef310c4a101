"""The conformance kit: it passes right rules and finds wrong ones.

The operators are functions of this module with rules of their own, so that no op pack is needed and none is disturbed.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from hyper_parallel import Partial, Replicate, Shard, Strategy, StrategyOp
from hyper_parallel.call import Solution
from hyper_parallel.families.contraction import Linear
from hyper_parallel.families.elementwise import Elementwise
from hyper_parallel.families.views import Reshape
from hyper_parallel.strategy import LayoutOp, P, R, S
from hyper_parallel.testing import ConformanceError, OpConformance, OpUnderTest, RanksFailed, check_op, sample, tensor
from hyper_parallel.testing.inputs import Sample
from hyper_parallel.testing.layouts import axis_placements, draw_cases, tensor_placements

SRC = Path(__file__).parents[1] / "src"
ONE = ((2,),)


def distributed(kind, **params):
    """Make a function an operator that DTensors reach, with a rule of this class."""

    def decorate(function):
        @functools.wraps(function)
        def operator(*args, **kwargs):
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if has_torch_function(tensors):
                return handle_torch_function(operator, tensors, *args, **kwargs)
            return function(*args, **kwargs)

        kind(f"{function.__module__}.{function.__qualname__}", **params)
        return operator

    return decorate


class Rows(StrategyOp):
    """Strategies given as a function of the call."""

    def __init__(self, op_name, *, rows, **attributes):
        super().__init__(op_name)
        self.rows = rows
        for name, value in attributes.items():
            setattr(self, name, value)

    def strategies(self, call):
        return self.rows(call)


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
    Rows, rows=lambda call: [Strategy([S(0)], (S(0), R)), Strategy([S(1)], (S(1), R))], num_outputs=lambda c: 2
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


# -- wrong rules ----------------------------------------------------------------------------------------------------


@distributed(Rows, rows=lambda call: [Strategy([S(0)], S(0)), Strategy([S(1)], S(1))])
def softmax_over_shards(x):
    return torch.softmax(x, 0)


@distributed(Rows, rows=lambda call: [Strategy([P], P)])
def exp_of_partial(x):
    return torch.exp(x)


@distributed(Rows, rows=lambda call: [Strategy([S(0)], R)])
def sum_without_reduction(x):
    return x.sum(0)


@distributed(Rows, rows=lambda call: [Strategy([S(0), R], S(0), invariant=[1])])
def wrong_gradient(x, y):
    return x * y


@distributed(Rows, rows=lambda call: [Strategy([S(0)], R), Strategy([S(0)], P)])
def shadowed_strategy(x):
    return x.detach().abs().amax() * 0 + x.new_ones(())


@distributed(Rows, rows=lambda call: [Strategy([S(0)], S(0))])
def keyed_by_object(x, key):
    return x * 2


@distributed(Rows, rows=lambda call: [Strategy([S(0)], S(0))])
def raises_on_shards(x):
    if x.shape[0] == 1:
        raise RuntimeError("cannot take a single row")
    return x * 2


@distributed(Elementwise)
def not_in_place_(x):
    return x.exp()


class WrongInPlace(OpConformance):
    """Not collected by pytest, as its name does not start with Test."""

    op = right_exp
    samples = (sample(tensor(4)),)
    inplace = not_in_place_


class Refusing(LayoutOp):
    """Refuses everything but whole tensors, with an error of its own, also where ``auto`` allows to redistribute."""

    def solve(self, call):
        if not call.inputs[0].layout.is_replicated():
            raise ValueError("no")
        return Solution([call.inputs[0].layout], [call.inputs[0].layout])


@distributed(Refusing)
def refusing(x):
    return x * 2


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (softmax_over_shards, (tensor(4, 6),), "values differ"),
        (exp_of_partial, (tensor(4),), "values differ"),
        (sum_without_reduction, (tensor(4, 3),), "values differ"),
        (shadowed_strategy, (tensor(4),), "another strategy with the same inputs comes first"),
        (refusing, (tensor(4),), "refused, although redistribution is allowed"),
        (refusing, (tensor(4),), "must be the standard RedistributionError"),
    ],
)
def test_wrong_rule_is_found(ranks, function, args, message):
    with pytest.raises(ConformanceError, match=message) as caught:
        check_op(ranks, function, *args, meshes=ONE)
    assert f"import {function.__name__}" in str(caught.value)


def missing_gradient(x, y):
    return x * y.detach()


def test_wrong_gradient_is_found(ranks):
    """The replica of a sharded product is not varying, so that its gradient is one rank's term only."""
    with pytest.raises(ConformanceError, match=r"gradient of input 1 .*values differ"):
        check_op(ranks, wrong_gradient, tensor(2, 3), tensor(1, 3), meshes=ONE)


def with_new_key(x):
    return keyed_by_object(x, object())


def test_growing_cache_is_found(ranks):
    with pytest.raises(ConformanceError, match="second time made 1 new cache entries"):
        check_op(ranks, with_new_key, tensor(4), meshes=ONE)


def plain_mean(x):
    return x.to(torch.float32).mean(0)


def test_reference_decides(ranks):
    with pytest.raises(ConformanceError, match=r"global shape is .*\n.*dtype is torch.float64, expected torch.float32"):
        check_op(ranks, right_exp, tensor(2, 3), meshes=ONE, declared=OpUnderTest(right_exp, reference=plain_mean))


def is_sharded(layouts):
    return any(isinstance(p, Shard) for p in layouts[0].placements)


def test_declarations_are_checked(ranks):
    with pytest.raises(ConformanceError, match="1 all_reduce in the forward, declared at most 0"):
        check_op(ranks, right_exp, tensor(4), meshes=ONE, declared=OpUnderTest(right_exp, max_collectives={}))
    with pytest.raises(ConformanceError, match="declared unsupported, yet the operator took them"):
        check_op(ranks, right_exp, tensor(4), meshes=ONE, declared=OpUnderTest(right_exp, unsupported=is_sharded))
    check_op(ranks, right_exp, tensor(4), meshes=ONE, declared=OpUnderTest(right_exp))


def test_error_on_one_rank_names_the_case(ranks):
    with pytest.raises(RanksFailed, match=r"(?s)cannot take a single row.*mesh 2, .* input 0: S\(0\)"):
        check_op(ranks, raises_on_shards, tensor(3), meshes=ONE)


def test_form_that_does_not_write_is_found(ranks):
    with pytest.raises(pytest.fail.Exception, match="values differ"):
        WrongInPlace().test_inplace(ranks, (0, (2,)))


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


def test_choice_of_layouts_is_seeded_and_capped():
    shapes = [(4, 6), (6,)]
    first = draw_cases(shapes, [True, False], [True, False], 2, 20, "seed")
    assert len(first) == len({tuple((p.placements, p.swapped) for p in c.inputs) for c in first}) == 20
    assert first == draw_cases(shapes, [True, False], [True, False], 2, 20, "seed")
    assert first != draw_cases(shapes, [True, False], [True, False], 2, 20, "another")
    assert any(p.varying for c in draw_cases(shapes, [True, True], [True, True], 2, 60, "seed") for p in c.inputs)
    assert all(isinstance(p, Replicate) for placed in first[0].inputs for p in placed.placements)
    assert all(not c.inputs[1].grad and Partial() not in c.inputs[1].placements for c in first)


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
        "from hyper_parallel.strategy import S\n"
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
