"""How the strategies of a rule are matched with a call's inputs."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, Strategy, distribute_tensor, redistribute_policy
from hyper_parallel._rules.strategy import P, R, S
from hyper_parallel.errors import RedistributionError
from hyper_parallel.testing.function_operators import StrategyFunctionOp, distributed


class Product(StrategyFunctionOp):
    signature = "x, w"


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0), S(0)], S(0)), Strategy([S(1), S(1)], S(1))])
def alike(x, y):
    return x * y


@distributed(
    Product,
    rows=lambda call: [
        Strategy({"x": S(0)}, S(0)),
        Strategy({"w": S(1)}, S(1)),
        Strategy({"x": S(1), "w": S(0)}, P),
        Strategy({"x": P}, P),
    ],
)
def product(x, w):
    return x @ w


@distributed(StrategyFunctionOp, rows=lambda call: [])
def whole_only(x):
    return x.flip(0)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([R, R, R], R)])
def too_many(x):
    return x


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([R], (R, R, R))], num_outputs=lambda c: 2)
def too_many_results(x):
    return x, x


def on(mesh, *placements, shape=(4, 4)):
    part = mesh if len(placements) == mesh.ndim else mesh["b"]
    return distribute_tensor(torch.ones(shape), part, placements, src_data_rank=None)


@pytest.mark.parametrize(
    ("x", "w", "out"),
    [
        (Replicate(), Replicate(), Replicate()),
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Shard(1), Shard(1)),
        (Shard(1), Shard(0), Partial()),
    ],
)
def test_a_row_that_fits_costs_nothing(mesh, x, w, out):
    with redistribute_policy("strict"):
        assert product(on(mesh, x), on(mesh, w)).placements == (out,)


def test_a_pending_sum_matches_its_row(mesh):
    x = DTensor.from_local(torch.ones(4, 4), mesh["b"], [Partial()])
    assert product(x, on(mesh, Replicate())).placements == (Partial(),)


def test_every_mesh_axis_is_matched_on_its_own(mesh):
    result = product(on(mesh, Shard(0), Replicate()), on(mesh, Replicate(), Shard(1)))
    assert result.placements == (Shard(0), Shard(1))
    result = product(on(mesh, Shard(0), Shard(1)), on(mesh, Replicate(), Shard(0)))
    assert result.placements == (Shard(0), Partial())


def test_a_replicate_input_follows_the_sharded_one(mesh):
    assert alike(on(mesh, Shard(1)), on(mesh, Replicate())).placements == (Shard(1),)
    assert alike(on(mesh, Replicate()), on(mesh, Shard(0))).placements == (Shard(0),)


def test_nothing_starts_to_be_sharded_on_its_own(mesh):
    assert alike(on(mesh, Replicate()), on(mesh, Replicate())).placements == (Replicate(),)


def test_everything_replicate_is_always_legal(mesh):
    assert whole_only(on(mesh, Replicate())).placements == (Replicate(),)


def test_the_cheaper_conversion_is_taken(mesh):
    with redistribute_policy("auto"):
        small, large = on(mesh, Shard(0), shape=(4, 4)), on(mesh, Shard(1), shape=(4, 4))
        assert alike(small, large).placements in ((Shard(0),), (Shard(1),))
        assert whole_only(on(mesh, Shard(0))).placements == (Replicate(),)


@pytest.mark.parametrize("policy", ["strict", "partial"])
def test_what_the_policy_forbids_is_refused_with_what_would_fit(mesh, policy):
    with redistribute_policy(policy), pytest.raises(RedistributionError) as caught:
        alike(on(mesh, Shard(0)), on(mesh, Shard(1)))
    assert "S(0), S(0) -> S(0)" in str(caught.value)
    assert "'b'" in str(caught.value)
    assert "redistribute_policy('auto')" in str(caught.value)


def test_operands_that_share_a_dim_are_sharded_in_the_same_order(mesh):
    x, y = on(mesh, Shard(0), Shard(0)), on(mesh, Shard(0), Shard(0))
    result = alike(x, y)
    assert result.placements == (Shard(0), Shard(0))
    assert result.layout is x.layout


def test_a_rule_that_lists_what_the_call_has_not(mesh):
    with pytest.raises(TypeError, match="but the call has 1 tensor inputs"):
        too_many(on(mesh, Replicate()))
    with pytest.raises(TypeError, match="but the call has 2 results, says num_outputs"):
        too_many_results(on(mesh, Replicate()))
