"""Plans take a bounded number of bytes, and what is used stays; layouts go with those who hold them."""

from __future__ import annotations

import gc

import pytest
import torch

from hyper_parallel import Layout, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel._rules.families.elementwise import Elementwise
from hyper_parallel.dispatch import dispatcher, plan_cache
from hyper_parallel.dispatch.plan_cache import PlanBudget, PlanCache
from hyper_parallel.sharding.mesh import mesh_info
from hyper_parallel.sharding.placements import PackedShard
from hyper_parallel.testing.function_operators import distributed


def look_up(cache, key):
    """As the dispatcher does."""
    return cache.young.get(key) or cache.recall(key)


def held(*caches):
    """Bytes of all plans, young and old."""
    return sum(plan_cache.size_of(key) for cache in caches for plans in (cache.young, cache.old) for key in plans)


def test_what_is_used_stays_and_the_rest_goes():
    budget = PlanBudget(limit=40 * 4096)
    busy, idle = PlanCache(budget), PlanCache(budget)
    idle.remember(("once",), "plan")
    for number in range(500):
        busy.remember((number,), f"plan {number}")
        busy.remember(("always",), "plan") if number == 0 else None
        assert look_up(busy, ("always",)) == "plan"
        assert look_up(busy, (number,)) == f"plan {number}"
        assert held(busy, idle) <= 40 * 4096
    assert look_up(idle, ("once",)) is None
    assert look_up(busy, (3,)) is None


def test_the_bytes_are_those_of_all_functions_together():
    budget = PlanBudget(limit=40 * 4096)
    caches = [PlanCache(budget) for _ in range(10)]
    for number in range(100):
        for cache in caches:
            cache.remember((number,), "plan")
    assert held(*caches) <= 40 * 4096
    assert len(budget._caches) == 10
    del cache, caches
    gc.collect()
    assert len(budget._caches) == 0


def test_a_plan_that_is_recalled_was_made_once():
    cache = PlanCache(PlanBudget(limit=40 * 4096))
    cache.remember(("mine",), "plan")
    cache.turn()
    assert look_up(cache, ("mine",)) == "plan"
    assert cache.made == 1


def test_long_keys_count_for_more():
    budget = PlanBudget(limit=2**20)
    cache = PlanCache(budget)
    for number in range(200):
        cache.remember((number, *range(1000)), "plan")
    assert held(cache) <= 2**20


@distributed(Elementwise, linear="first")
def doubled(x):
    return x * 2


@pytest.mark.ranks(2)
def test_a_new_shape_at_every_step(monkeypatch):
    monkeypatch.setattr(plan_cache.default_budget, "limit", 2**18)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    w = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
    for rows in range(2, 150):
        x = distribute_tensor(torch.ones(rows, 3), mesh, [Shard(0)], src_data_rank=None)
        assert torch.equal(doubled(x).full_tensor(), torch.full((rows, 3), 2.0))
        doubled(w)
    plans = [rule.plans for rule in dispatcher._rules.values() if hasattr(rule, "plans")]
    assert held(*plans) <= 2**18
    assert any(len(p.old) for p in plans)


@pytest.mark.ranks(2)
def test_layouts_that_nobody_holds_are_dropped():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layouts = mesh_info(mesh).layouts
    kept = Layout.from_placements(mesh, [PackedShard(0, (2, 4))], ndim=2)
    gc.collect()
    before = len(layouts)
    for size in range(500):
        made = Layout.from_placements(mesh, [PackedShard(0, (size, 3))], ndim=2)
        assert made is Layout.from_placements(mesh, [PackedShard(0, (size, 3))], ndim=2)
        made.with_placements({0: Partial()})
    del made
    gc.collect()
    assert len(layouts) <= before + 1
    assert kept is Layout.from_placements(mesh, [PackedShard(0, (2, 4))], ndim=2)
