"""A pending max or min passes what never falls as its operand grows, without communication."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import CommTrace, DTensor, Partial, Replicate, Shard
from hyper_parallel.plugins import OpTable
from hyper_parallel.testing import OpConformance, make, mesh_of, sample, tensor

LARGER, SMALLER = Partial("max"), Partial("min")
FOLD = {LARGER: torch.amax, SMALLER: torch.amin}
PAIRS = {
    "maximum": (torch.maximum, LARGER),
    "max": (torch.max, LARGER),
    "minimum": (torch.minimum, SMALLER),
    "min": (torch.min, SMALLER),
}
RISING = sorted(
    entry.name
    for table in OpTable.all_in_package("hyper_parallel_ops_basic", "tables")
    for entry in table.entries()
    if entry.params.get("rising") == "first" and "." not in entry.name and not entry.name.endswith("_")
)
BOUNDS = {"clamp": (-1, 2), "clip": (-1, 2), "clamp_min": (0.5,), "clamp_max": (0.5,)}


def terms(seed):
    """What four ranks hold: any numbers, infinite ones and no numbers among them."""
    drawn = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn[0, 0, 0] = drawn[2, 1, 1] = torch.nan
    drawn[1, 2, 2], drawn[3, 3, 0] = torch.inf, -torch.inf
    return drawn


def pending(held, placement):
    return DTensor.from_local(held[dist.get_rank()], mesh_of((4,)), [placement])


def check(function, want, *operands, placement):
    with CommTrace() as trace:
        out = function(*operands)
    assert not trace.events
    assert out.placements == (placement,)
    torch.testing.assert_close(out.full_tensor(), want, equal_nan=True, rtol=1e-12, atol=0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", PAIRS)
def test_the_larger_of_two_pending_maxima_is_a_pending_maximum(name):
    function, kind = PAIRS[name]
    a, b = terms(1), terms(2)
    check(function, function(FOLD[kind](a, 0), FOLD[kind](b, 0)), pending(a, kind), pending(b, kind), placement=kind)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [LARGER, SMALLER], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_one_operand_may_be_pending_either_way(name, kind):
    function, held, row = PAIRS[name][0], terms(1), terms(2)[0, 0]
    other, want = make(row, mesh_of((4,)), [Replicate()]), function(FOLD[kind](held, 0), row)
    check(function, want, pending(held, kind), other, placement=kind)
    check(function, want, other, pending(held, kind), placement=kind)


@pytest.mark.ranks(4)
def test_two_kinds_at_once_are_reduced():
    a, b = terms(1), terms(2)
    with CommTrace() as trace:
        out = torch.maximum(pending(a, SMALLER), pending(b, SMALLER))
    assert trace.counts["all_reduce"] >= 1
    torch.testing.assert_close(out.full_tensor(), torch.maximum(a.amin(0), b.amin(0)), equal_nan=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [LARGER, SMALLER], ids=str)
def test_functions_that_never_fall_pass_both(kind):
    assert len(RISING) > 15
    held = terms(3)
    for name in RISING:
        function = (
            getattr(torch, name, None) or getattr(torch.nn.functional, name, None) or getattr(torch.special, name)
        )
        more = BOUNDS.get(name, ())
        check(
            lambda x, f=function, m=more: f(x, *m),
            function(FOLD[kind](held, 0), *more),
            pending(held, kind),
            placement=kind,
        )


@pytest.mark.ranks(4)
def test_other_functions_reduce_first():
    held = terms(4)
    for function in (torch.neg, torch.abs, torch.sqrt, torch.nan_to_num, torch.fmax):
        operands = [pending(held, LARGER) for _ in range(2 if function is torch.fmax else 1)]
        want = function(*[held.amax(0)] * len(operands))
        torch.testing.assert_close(function(*operands).full_tensor(), want, equal_nan=True)


@pytest.mark.ranks(4)
def test_a_scale_of_the_largest_element_costs_one_all_reduce():
    """As for quantizing: the largest magnitude of two tensors, not below a bound."""
    a, b = terms(5).nan_to_num()[0], terms(6).nan_to_num()[0]
    mesh = mesh_of((4,))
    with CommTrace() as trace:
        found = [make(x, mesh, [Shard(0)]).abs().amax() for x in (a, b)]
        scale = torch.maximum(*found).clamp_min(1e-12).reduce_partial()
    assert trace.counts == {"all_reduce": 1}
    assert torch.equal(scale.to_local(), torch.maximum(a.abs().amax(), b.abs().amax()))


class TestMaximum(OpConformance):
    op = torch.maximum
    samples = (sample(tensor(5, 3, grad=False), tensor(5, 3, grad=False)), sample(tensor(5, 3, grad=False), tensor(3)))


class TestMinimum(OpConformance):
    op = torch.minimum
    samples = (sample(tensor(5, 3, grad=False), tensor(5, 3, grad=False)), sample(tensor(5, 3, grad=False), tensor(3)))


class TestClamp(OpConformance):
    op = torch.clamp
    inplace = "clamp_"
    samples = (
        sample(tensor(5, 3, grad=False), -0.5, 0.5),
        sample(tensor(5, 3, grad=False), tensor(3, grad=False), tensor(5, 3, grad=False)),
    )
