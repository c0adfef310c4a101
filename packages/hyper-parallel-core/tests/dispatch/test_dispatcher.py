"""The dispatcher's loop: a warm call is one look-up, and every rewriting of the arguments is one more, made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import hyper_parallel
from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    Strategy,
    distribute_tensor,
    implicit_replication,
    redistribute_policy,
)
from hyper_parallel._rules.families.elementwise import Elementwise
from hyper_parallel._rules.strategy import P, S
from hyper_parallel.dispatch import dispatcher
from hyper_parallel.errors import RedistributionError
from hyper_parallel.testing.function_operators import StrategyFunctionOp, distributed

SOURCES = Path(hyper_parallel.__file__).parent


def reading(signature):
    """A class of rules that know their arguments by these names."""
    return type("Rule", (StrategyFunctionOp,), {"signature": signature})


@distributed(Elementwise, linear="sum")
def add(x, y):
    return x + y


@distributed(Elementwise, linear="first")
def scale(x, factor):
    return x * factor


@distributed(Elementwise)
def relu(x, inplace=False):
    return torch.relu_(x) if inplace else torch.relu(x)


@distributed(Elementwise)
def exp_(x):
    return x.exp_()


@distributed(
    reading("input, dim"), rows=lambda call: [Strategy([S(1 - call.dim())], S(0)), Strategy([S(call.dim())], P)]
)
def total(x, dim):
    return x.sum(dim)


@distributed(reading("x, by"), rows=lambda call: [Strategy({"x": S(0)}, S(0)), Strategy({"x": P}, P)])
def times_matrix(x, by):
    return x @ by


@distributed(reading("x, count"), rows=lambda call: [Strategy([S(1)], S(1))] if call.numbers("count") else [])
def first(x, count):
    return x[: int(count)] * 1


@distributed(reading("x, like"), uncounted=[1], rows=lambda call: [Strategy({"x": S(0)}, S(0))])
def cast_like(x, like):
    return x.to(like.dtype)


def sharded(mesh, *shape, axis="b", dim=0):
    return distribute_tensor(torch.randn(shape), mesh[axis], [Shard(dim)], src_data_rank=None)


def replicated(mesh, *shape):
    return distribute_tensor(torch.randn(shape), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


def pending(mesh, *shape):
    return DTensor.from_local(torch.randn(shape), mesh["b"], [Partial()])


# -- warm calls -----------------------------------------------------------------------------------------------------


def test_a_warm_call_is_one_look_up(mesh, counter):
    x = sharded(mesh, 4, 6)
    assert counter.of(add, x, x) == (1, 1)
    assert counter.of(add, x, x) == (1, 0)
    assert counter.of(add, sharded(mesh, 4, 6), x) == (1, 0)  # what counts is how a tensor is laid out
    assert counter.of(add, sharded(mesh, 6, 6), sharded(mesh, 6, 6)) == (1, 1)


def test_a_warm_call_is_four_python_calls(mesh):
    x = sharded(mesh, 4, 6)
    key = add  # what the dispatcher knows the function by
    for _ in range(3):
        dispatcher.torch_function(DTensor, key, (), (x, x))
    seen = []

    def note(frame, event, _):
        if event == "call" and SOURCES in (path := Path(frame.f_code.co_filename)).parents:
            seen.append((path.parent.name, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        dispatcher.torch_function(DTensor, key, (), (x, x))
    finally:
        sys.setprofile(None)
    own = [name for folder, name in seen if folder in ("dispatch", "tensor", "sharding", "registry")]
    assert len(own) <= 4, own


def test_what_needs_a_gradient_has_a_plan_of_its_own(mesh, counter):
    x = sharded(mesh, 4, 6)
    y = sharded(mesh, 4, 6).requires_grad_()
    counter.of(add, x, x)
    assert counter.of(add, x, y) == (1, 1)
    with torch.no_grad():
        assert counter.of(add, x, y) == (1, 1)
        assert counter.of(add, x, x) == (1, 0)  # with gradients off it does not matter


def test_a_plan_counts_under_its_policy_only(mesh, counter):
    x = sharded(mesh, 3, 6)
    counter.of(add, x, x)
    with redistribute_policy("strict"):
        assert counter.of(add, x, x)[1] == 1
    assert counter.of(add, x, x) == (1, 0)


def test_calls_that_differ_in_a_factor_share_a_plan_and_in_a_dim_they_do_not(mesh, counter):
    x = sharded(mesh, 4, 6)
    assert counter.of(scale, x, 2.0) == (1, 1)
    assert counter.of(scale, x, 3.0) == (1, 0)
    assert torch.equal(scale(x, 3.0).to_local(), x.to_local() * 3.0)
    assert counter.of(total, x, 1) == (1, 1)
    assert counter.of(total, x, 0) == (1, 1)
    assert (total(x, 1).placements, total(x, 0).placements) == ((Shard(0),), (Partial(),))


# -- rewritten arguments --------------------------------------------------------------------------------------------


def test_a_redistributed_input_is_a_second_look_up_once(mesh, counter):
    x, whole = sharded(mesh, 4, 6), replicated(mesh["b"], 4, 6)
    assert counter.of(add, x, whole) == (2, 2)
    assert counter.of(add, x, whole) == (1, 0)  # the plan leads to the one after it
    assert counter.of(add, x, replicated(mesh["b"], 4, 6)) == (1, 0)
    assert torch.equal(add(x, whole).to_local(), x.to_local() + whole.to_local()[:2])


def test_a_redistributed_input_by_name(mesh, counter):
    x, whole = sharded(mesh, 4, 6), replicated(mesh["b"], 4, 6)
    calls = [counter.of(add, x, y=whole) for _ in range(2)]
    assert calls == [(2, 2), (1, 0)]
    assert torch.equal(add(x, y=whole).to_local(), x.to_local() + whole.to_local()[:2])


def test_a_plain_tensor_is_lifted(mesh, counter):
    x, plain = sharded(mesh, 4, 6), torch.randn(6)
    with implicit_replication():
        assert add(x, plain).placements == (Shard(0),)
        assert torch.equal(add(x, plain).to_local(), x.to_local() + plain)
        assert counter.of(add, x, plain) == (1, 0)


def test_a_plain_tensor_that_is_only_read_for_its_dtype_is_lifted(mesh):
    result = cast_like(sharded(mesh, 4, 6), torch.empty(2, dtype=torch.float64))
    assert (result.dtype, result.placements) == (torch.float64, (Shard(0),))


def test_another_plain_tensor_is_refused_with_its_shape(mesh):
    with pytest.raises(RuntimeError, match=r"plain tensor of shape \(6,\) is mixed with a DTensor of shape \(4, 6\)"):
        add(sharded(mesh, 4, 6), torch.randn(6))


def test_names_in_another_order_mean_the_same_call(mesh, counter):
    x, by = sharded(mesh, 4, 6), replicated(mesh["b"], 6, 6)
    expected = x.to_local() @ by.to_local()
    counter.of(times_matrix, x, by)
    assert [counter.of(times_matrix, by=by, x=x) for _ in range(2)] == [(2, 1), (2, 0)]  # as written, as rules read it
    assert counter.of(times_matrix, x, by=by) == (1, 0)
    for result in (times_matrix(x, by), times_matrix(x, by=by), times_matrix(by=by, x=x)):
        assert result.placements == (Shard(0),)
        assert torch.equal(result.to_local(), expected)


def test_a_sum_that_was_reduced_once_is_used_so(mesh, counter):
    x = scale(pending(mesh, 4, 6), 1.0)  # no leaf, whose owner may write to it
    relu(x)  # needs the value: one reduction, which is remembered
    reduced = x.redistribute(placements=[Replicate()])
    assert scale(x, 2.0).placements == (Replicate(),)
    assert torch.equal(scale(x, 2.0).to_local(), reduced.to_local() * 2.0)
    assert scale(pending(mesh, 4, 6), 2.0).placements == (Partial(),)  # this one was not
    lookups, made = counter.of(scale, x, 2.0)
    assert (lookups, made) == (2, 0)


def test_a_value_that_a_rule_asks_for_is_read_once(mesh, counter, monkeypatch):
    x = sharded(mesh, 3, 4, dim=1)
    read = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self, old=torch.Tensor.tolist: read.append(self) or old(self))
    result = first(x, torch.tensor(2))
    assert len(read) == 1
    assert torch.equal(result.to_local(), x.to_local()[:2])
    assert counter.of(first, x, torch.tensor(2)) == (2, 1)  # asked anew, as it may hold another number; then known


def test_a_tensor_joins_on_a_sub_mesh(mesh, counter):
    x, whole = sharded(mesh, 4, 6), replicated(mesh, 4, 6)
    result = add(x, whole)
    assert result.device_mesh == mesh["b"]
    assert torch.equal(result.to_local(), x.to_local() + whole.to_local()[:2])
    assert counter.of(add, x, whole)[1] == 0


def test_on_a_mesh_that_is_no_part_of_the_other_nothing_joins(mesh):
    with pytest.raises(RedistributionError, match="the inputs are on different meshes"):
        add(sharded(mesh, 4, 6), sharded(mesh, 4, 6, axis="a"))


# -- written arguments ----------------------------------------------------------------------------------------------


def test_an_inplace_call_returns_its_target(mesh):
    x = sharded(mesh, 4, 6)
    local = x.to_local().clone()
    assert exp_(x) is x
    assert torch.equal(x.to_local(), local.exp())


def test_inplace_true_writes_and_false_does_not(mesh):
    x = sharded(mesh, 4, 6)
    local = x.to_local().clone()
    assert relu(x, False) is not x
    assert torch.equal(x.to_local(), local)
    assert relu(x, inplace=True) is x
    assert torch.equal(x.to_local(), local.relu())


# -- the table of rules ---------------------------------------------------------------------------------------------


def test_plans_are_counted_and_forgotten(mesh):
    x = sharded(mesh, 4, 6)
    add(x, x)
    assert dispatcher.known_rule(add).name == "add"
    assert dispatcher.plans_made() >= 1
    dispatcher.forget_rules()
    assert dispatcher.known_rule(add) is None
    assert dispatcher.plans_made() == 0
    assert torch.equal(add(x, x).to_local(), 2 * x.to_local())
