"""What an operator under test declares is held to be true, and has to test something."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hyper_parallel import Shard
from hyper_parallel._rules.families.elementwise import Elementwise
from hyper_parallel.testing import ConformanceError, OpConformance, OpUnderTest, check_op, conformance, sample, tensor
from hyper_parallel.testing.function_operators import distributed

ONE = ((2,),)


@distributed(Elementwise)
def right_exp(x, out=None):
    return torch.exp(x, out=out)


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


def test_forms_are_tested_below_a_base_class_that_had_none():
    base = type("Base", (OpConformance,), {"op": torch.exp, "samples": (sample(tensor(4)),)})
    child = type("Child", (base,), {"inplace": "exp_", "out": True})
    assert base.test_inplace is base.test_out is None
    assert child.test_inplace is OpConformance.test_inplace
    assert child.test_out is OpConformance.test_out


class Collected:
    """What pytest gives to ``pytest_generate_tests``."""

    fixturenames = ("conformance_case",)

    def parametrize(self, name, given):
        self.given = given


def test_declared_gap_is_a_strict_xfail():
    """So that one that works is a failure."""
    attributes = {"op": right_exp, "samples": (sample(tensor(4)),), "meshes": ((2,), (4,)), "gaps": {"4-2": "not yet"}}
    collected = Collected()
    type("Declared", (OpConformance,), attributes)().pytest_generate_tests(collected)
    assert [[(m.name, m.kwargs) for m in given.marks] for given in collected.given] == [
        [("xfail", {"reason": "not yet", "strict": True})],
        [],
    ]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "has no op"),
        ({"op": right_exp}, r"samples must list calls, .* got \(\)"),
        ({"op": right_exp, "samples": sample(tensor(4))}, "samples must list calls"),
        ({"op": right_exp, "samples": (sample(tensor(4)),), "gaps": {"5-*": ""}}, r"'5-\*' is none of 4-2, 4-4, 4-2x2"),
    ],
    ids=["no op", "no samples", "no comma", "stray gap"],
)
def test_declaration_that_tests_nothing_is_an_error(attributes, message):
    with pytest.raises(pytest.fail.Exception, match=message):
        type("Declared", (OpConformance,), attributes)().pytest_generate_tests(Collected())


@pytest.mark.parametrize(("most", "drawn"), [(None, 6), (2, 2), (99, 6)])
def test_fewer_layouts_for_a_quick_look(ranks, monkeypatch, most, drawn):
    limits = []

    def trial(func, owner, one, mesh, form, limit, **_):
        limits.append(limit)
        return SimpleNamespace(check=lambda: None)

    monkeypatch.setattr(conformance, "Trial", trial)
    attributes = {"op": right_exp, "samples": (sample(tensor(4)),), "max_layouts": 6}
    type("Declared", (OpConformance,), attributes)().test_layouts(ranks, (0, (2,), True), most)
    assert limits == [drawn]
