"""Sharding replaces parameters: an optimizer from before is refused where its step would train nothing."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    ShardingPlan,
    distribute_module,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
    shard_module,
)

STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def mesh_of(name="tp"):
    return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


def by_shard_module(net):
    return shard_module(net, mesh_of(), ShardingPlan(plan={"up.weight": [Shard(0)]}))


def by_parallelize_module(net):
    return parallelize_module(net, mesh_of(), STYLES)


def by_parallelize_module_with_a_sharding_plan(net):
    return parallelize_module(net, mesh_of(), ShardingPlan(plan={"up.weight": [Shard(0)]}))


def by_distribute_module(net):
    def partition(name, module, mesh):
        if name == "up":  # as the documentation of PyTorch does it
            module.register_parameter("weight", nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)])))

    return distribute_module(net, mesh_of(), partition)


def by_a_style_alone(net):
    ColwiseParallel().apply(net.up, mesh_of())
    RowwiseParallel().apply(net.down, mesh_of())
    return net


WAYS = [
    (by_shard_module, "'up.weight' of Mlp", "shard_module"),
    (by_parallelize_module, "'up.weight' of Mlp", "parallelize_module"),
    (by_parallelize_module_with_a_sharding_plan, "'up.weight' of Mlp", "parallelize_module"),
    (by_distribute_module, "'up.weight' of Mlp", "distribute_module"),
    (by_a_style_alone, "'weight' of Linear", "ColwiseParallel.apply"),
    (fully_shard, "'up.weight' of Mlp", "fully_shard"),
]


def step_on(net, optimizer):
    x = torch.ones(2, 4)
    if any(p.device_mesh.mesh_dim_names == ("tp",) for p in net.parameters()):
        x = distribute_tensor(x, mesh_of(), [Replicate()])
    net(x).square().sum().backward()
    optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("shard", "parameter", "call"), WAYS)
def test_optimizer_from_before_is_refused(shard, parameter, call):
    net = Mlp()
    early = torch.optim.AdamW(net.parameters())
    net = shard(net)
    message = (
        rf"AdamW.step\(\): parameter {parameter} was replaced by {call}, and this optimizer holds the one from before, "
        rf"so its step would change nothing in the model. Build the AdamW after {call}, from"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            step_on(net, early)
    late = torch.optim.AdamW(net.parameters())
    step_on(net, late)


@pytest.mark.ranks(4)
def test_optimizer_from_between_two_calls_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    net = Mlp()
    first = torch.optim.SGD(net.parameters())
    parallelize_module(net, mesh["tp"], STYLES)
    between = torch.optim.SGD(net.parameters())
    fully_shard(net, mesh=mesh["fsdp"])
    for optimizer in (first, between):
        net(torch.ones(2, 4)).square().sum().backward()
        with pytest.raises(RuntimeError, match=r"'up.weight' of Mlp was replaced by fully_shard"):
            optimizer.step()
    torch.optim.SGD(net.parameters()).step()


@pytest.mark.ranks(2)
def test_optimizer_that_was_given_the_new_parameters_may_step():
    net = Mlp()
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    parallelize_module(net, mesh_of(), STYLES)
    early.param_groups[0]["params"] = list(net.parameters())
    before = net.up.weight.full_tensor().clone()
    step_on(net, early)
    assert not torch.equal(net.up.weight.full_tensor(), before)


@pytest.mark.ranks(2)
def test_old_parameter_that_is_trained_elsewhere_may_step():
    """A weight shared with a module outside the call keeps its use there; the tie is the user's to keep or cut."""
    net, outside = Mlp(), nn.Linear(4, 8)
    outside.weight = net.up.weight
    before = outside.weight.detach().clone()
    parallelize_module(net, mesh_of(), STYLES)
    own, other = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(outside.parameters(), lr=0.1)
    for _ in range(2):
        outside(torch.ones(2, 4)).sum().backward()
        step_on(net, own)
        other.step()
    assert outside.weight.grad is not None
    assert not torch.equal(outside.weight, before)


@pytest.mark.ranks(2)
def test_parameters_added_to_an_optimizer_later_are_checked_too():
    net, plain = Mlp(), nn.Linear(2, 2)
    old = list(net.parameters())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    shard_module(net, mesh_of(), ShardingPlan(plan={"up.weight": [Shard(0)]}))
    plain(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": old})
    with pytest.raises(RuntimeError, match=r"'up.weight' of Mlp was replaced by shard_module"):
        step_on(net, optimizer)


@pytest.mark.ranks(2)
def test_optimizer_that_calls_its_closure_is_refused_at_its_second_step():
    """Before the first one there are no gradients."""
    net = Mlp()
    early = torch.optim.LBFGS(net.parameters())
    shard_module(net, mesh_of(), ShardingPlan(plan={"up.weight": [Shard(0)]}))
    x = distribute_tensor(torch.ones(2, 4), mesh_of(), [Replicate()])

    def closure():
        early.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        return loss

    early.step(closure)
    with pytest.raises(RuntimeError, match="was replaced by shard_module"):
        early.step(closure)


@pytest.mark.ranks(2)
def test_copies_are_new_models_and_nothing_is_kept_alive():
    net = Mlp()
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    twin, its_optimizer = copy.deepcopy((net, early))
    shard_module(net, mesh_of(), ShardingPlan(plan={"up.weight": [Shard(0)]}))
    twin(torch.ones(2, 4)).sum().backward()
    its_optimizer.step()  # holds the parameters of the plain twin
    sharded = weakref.ref(net.up.weight)
    del net
    gc.collect()
    assert sharded() is None
    early.step()  # nobody misses the gradient
    plain = weakref.ref(early.param_groups[0]["params"][0])
    del early
    gc.collect()
    assert plain() is None


@pytest.mark.ranks(2)
def test_sharding_lets_old_parameters_go_one_by_one():
    """Noting what is replaced does not keep the whole model beside its shards."""
    alive = []

    def partition(name, module, mesh):
        if isinstance(module, nn.Linear):
            alive.append([ref() is not None for ref in whole])
            module.register_parameter("weight", nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)])))

    net = Mlp()
    whole = [weakref.ref(net.up.weight), weakref.ref(net.down.weight)]
    distribute_module(net, mesh_of(), partition)
    assert alive == [[True, True], [False, True]]


@pytest.mark.ranks(2)
def test_compiled_steps_are_checked_too():
    net, plain = Mlp(), nn.Linear(2, 2)
    early, late = torch.optim.SGD(net.parameters()), torch.optim.SGD(plain.parameters(), lr=0.5)
    shard_module(net, mesh_of(), ShardingPlan(plan={"up.weight": [Shard(0)]}))
    plain(torch.ones(1, 2)).sum().backward()
    before = plain.bias.detach().clone()
    torch.compile(late.step, backend="eager")()
    torch.testing.assert_close(plain.bias.detach(), before - 0.5)
    early.step = torch.compile(early.step, backend="eager")
    with pytest.raises(RuntimeError, match="was replaced by shard_module"):
        step_on(net, early)
