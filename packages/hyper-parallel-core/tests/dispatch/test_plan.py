"""What a cache miss makes of a rule's decision."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, Strategy, distribute_tensor, redistribute_policy
from hyper_parallel._rules.families.elementwise import Elementwise
from hyper_parallel._rules.strategy import R, S
from hyper_parallel.dispatch import dispatcher
from hyper_parallel.dispatch.find_rule import rule_of
from hyper_parallel.dispatch.gradient_types import vary_axes
from hyper_parallel.dispatch.plan import finish, make_plan
from hyper_parallel.errors import RedistributionError
from hyper_parallel.testing.function_operators import StrategyFunctionOp, distributed


@distributed(Elementwise, linear="sum")
def add(x, y):
    return x + y


@distributed(Elementwise)
def add_(x, y):
    return x.add_(y)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], (S(0), R))], num_outputs=lambda call: 2)
def with_size(x):
    return x * 2, torch.zeros(())


def on(mesh, placement, *shape):
    return distribute_tensor(torch.randn(shape), mesh["b"], [placement], src_data_rank=None)


def plan_of(operator, *args, solution=None):
    return make_plan(rule_of(operator), args, {}, solution)


def test_inputs_that_fit(mesh):
    x = on(mesh, Shard(0), 4, 6)
    plan = plan_of(add, x, x)
    assert plan.ready
    assert plan.changes is plan.mesh is None
    assert plan.call is rule_of(add).func


def test_an_input_that_does_not_fit_and_the_plan_after_it(mesh):
    x, whole = on(mesh, Shard(0), 4, 6), on(mesh, Replicate(), 4, 6)
    plan = plan_of(add, x, whole)
    assert not plan.ready
    assert plan.places == [1]
    ((index, layout, varying),) = plan.changes
    assert (index, layout, varying) == (1, x.layout, frozenset())
    assert plan_of(add, x, x, solution=plan.solution).ready


def test_a_replicate_input_beside_a_sharded_one_enters_as_varying(mesh):
    x, scale = on(mesh, Shard(0), 4, 6), on(mesh, Replicate(), 6).requires_grad_()
    ((index, layout, varying),) = plan_of(add, x, scale).changes
    assert (index, layout, varying) == (1, scale.layout, frozenset({0}))
    assert plan_of(add, x, scale.detach()).ready  # without a gradient there is nothing to type
    assert vary_axes([x, scale]) == [frozenset(), frozenset({0})]


def test_the_meshes_meet_first(mesh):
    x, whole = on(mesh, Shard(0), 4, 6), distribute_tensor(torch.ones(4, 6), mesh, [Replicate()] * 2)
    plan = plan_of(add, x, whole)
    assert plan.mesh is x.layout.info
    assert not plan.ready


def test_a_pending_sum_is_looked_at_on_every_call(mesh):
    x = DTensor.from_local(torch.ones(4, 6), mesh["b"], [Partial()])
    plan = plan_of(add, x, x)
    assert plan.pending
    assert not plan.ready
    assert plan.changes is None


def test_under_strict_nothing_is_communicated(mesh):
    x, other = on(mesh, Shard(0), 4, 6), on(mesh, Shard(1), 4, 6)
    with redistribute_policy("strict"), pytest.raises(RedistributionError):
        plan_of(add, x, other)


def test_a_written_argument_keeps_its_layout(mesh):
    with pytest.raises(RedistributionError):
        plan_of(add_, on(mesh, Replicate(), 4, 6), on(mesh, Shard(0), 4, 6))


def test_the_first_result_completes_a_plan(mesh):
    x = on(mesh, Shard(0), 4, 6)
    plan = plan_of(add, x, x)
    assert plan.is_new
    local = plan.call(x.to_local(), x.to_local())
    assert finish(plan, local) is local
    assert not plan.is_new
    assert plan.spec is x.spec


def test_several_results(mesh):
    x = on(mesh, Shard(0), 4, 6)
    twice, number = dispatcher.dispatch(with_size, (x,), {})
    assert twice.placements == (Shard(0),)
    assert number.placements == (Replicate(),)
    assert (twice.shape, number.shape) == ((4, 6), ())
