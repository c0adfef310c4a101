"""Every operator of the elementwise table against plain torch; those with arguments of their own have a sample here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Shard
from hyper_parallel.plugins import OpTable
from hyper_parallel.testing import OpConformance, OpUnderTest, at_most, check_op, make, mesh_of, sample, tensor
from hyper_parallel.utils.function_names import dotted_function

NAMES = sorted(
    entry.name
    for table in OpTable.all_in_package("hyper_parallel_ops_basic", "tables")
    for entry in table.entries()
    if entry.class_name == "Elementwise" and not entry.name.endswith("_")
)
# Inside the domain of all functions, and away from their kinks.
UNIT = tensor(5, 3, low=0.1, high=0.9)
NO_GRADIENT = tensor(5, 3, low=0.1, high=0.9, grad=False)
ROW = tensor(3, low=0.1, high=0.9)
INTEGERS = tensor(5, 3, dtype=torch.int64, low=1, high=6)
MASK = tensor(5, 3, dtype=torch.bool)
SAMPLES = {
    "celu": (UNIT, 0.7),
    "clamp": (UNIT, 0.3, 0.6),
    "clip": (UNIT, 0.3, 0.6),
    "clamp_max": (UNIT, 0.4),
    "clamp_min": (UNIT, 0.4),
    "bitwise_not": (INTEGERS,),
    "bitwise_and": (INTEGERS, INTEGERS),
    "bitwise_or": (INTEGERS, INTEGERS),
    "bitwise_xor": (INTEGERS, INTEGERS),
    "bitwise_left_shift": (INTEGERS, INTEGERS),
    "bitwise_right_shift": (INTEGERS, INTEGERS),
    "acosh": (tensor(5, 3, low=1.2, high=3),),
    "addcdiv": (UNIT, ROW, UNIT),
    "addcmul": (UNIT, ROW, UNIT),
    "lerp": (UNIT, ROW, UNIT),
    "where": (MASK, UNIT, ROW),
    "masked_fill": (UNIT, MASK, 0.25),
    "threshold": (UNIT, 0.5, 0.1),
    "__rdiv__": (UNIT, 2.0),
    "__rtruediv__": (UNIT, 2.0),
    "__rpow__": (UNIT, 2.0),
    "__rfloordiv__": (INTEGERS, 7),  # has no derivative
    "__rmod__": (INTEGERS, 7),
    "__rlshift__": (INTEGERS, 2),
    "__rrshift__": (INTEGERS, 64),
    "floor_divide": (INTEGERS, INTEGERS),
    "heaviside": (INTEGERS, INTEGERS),
    "imag": (torch.complex(torch.linspace(0, 1, 15), torch.linspace(1, 2, 15)).view(5, 3),),
    "xlogy": (UNIT, ROW),
    "gcd": (INTEGERS, INTEGERS),
    "lcm": (INTEGERS, INTEGERS),
    "polygamma": (1, UNIT),
    "mvlgamma": (tensor(5, 3, low=1, high=3), 2),
    "multigammaln": (tensor(5, 3, low=1, high=3), 2),
    # These have no derivative.
    **dict.fromkeys((n for n in NAMES if "_polynomial_" in n), (NO_GRADIENT, tensor(3, low=0.0, high=4.0, grad=False))),
    **dict.fromkeys(("scaled_modified_bessel_k0", "scaled_modified_bessel_k1"), (NO_GRADIENT,)),
    # These have no derivative by their first argument.
    **dict.fromkeys(("igamma", "igammac", "gammainc", "gammaincc", "zeta"), (NO_GRADIENT, ROW)),
}


def function(name):
    """The function as users call it."""
    if "." in name:
        return dotted_function(name)
    for owner in (torch, F, torch.special, torch.Tensor):
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(name)


def call(*args, name):
    return function(name)(*args)


def arguments(name):
    """The sample of its own, or as many tensors as the function takes."""
    if name in SAMPLES:
        return SAMPLES[name]
    for given in ((UNIT, ROW), (UNIT,)):
        try:
            function(name)(*(torch.rand(*g.shape, dtype=torch.float64) for g in given))
        except (TypeError, RuntimeError):  # one that takes a flag in the second place
            continue
        return given
    raise AssertionError(f"no sample for {name}")


@pytest.mark.parametrize("name", NAMES)
def test_operator(ranks, name):
    free = OpUnderTest(call, max_collectives=at_most())
    check_op(ranks, call, *arguments(name), name=name, meshes=((2, 2),), max_layouts=8, declared=free)


class TestDivision(OpConformance):
    """A pending sum passes where the quotient is not rounded."""

    op = torch.div
    inplace = "div_"
    samples = (
        sample(tensor(5, 6), tensor(5, 6, low=1, high=2)),
        sample(tensor(5, 6), 0.3, rounding_mode="floor"),
        sample(tensor(5, 6), tensor(6, low=1, high=2), rounding_mode="trunc"),
    )


class TestAdd(OpConformance):
    op = torch.add
    inplace = "add_"
    out = True
    samples = (
        sample(tensor(5, 6), tensor(5, 6)),
        sample(tensor(5, 6), tensor(6)),
        sample(tensor(2, 3), tensor(2, 3), alpha=2),
        sample(tensor(5, 6), 3.0),
    )
    max_layouts = 20


class TestMulWithBroadcastAndMixedTypes(OpConformance):
    op = torch.mul
    samples = (
        sample(tensor(5, 1, 3), tensor(4, 1)),
        sample(tensor(5, 3), tensor()),
        sample(tensor(5, 3, dtype=torch.float32), tensor(5, 3)),
        sample(tensor(5, 3, dtype=torch.int64, low=-3, high=3), tensor(5, 3)),
    )
    max_layouts = 20


@pytest.mark.ranks(4)
def test_python_functions_of_elements():
    value = torch.arange(15.0).view(5, 3)
    x = make(value, mesh_of((4,)), [Shard(0)])
    assert x.apply_(lambda a: a + 1) is x
    x.map_(x.clone(), lambda a, b: a * b)
    x.map2_(x.clone(), x.clone(), lambda a, b, c: a + b + c)
    torch.testing.assert_close(x.full_tensor(), 3 * (value + 1) ** 2)
