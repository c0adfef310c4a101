"""shard_module in both forms: parameters, inputs and outputs laid out by a plan, the model's code unmodified."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyper_parallel import (
    CommTrace,
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    shard_module,
)

R, P = Replicate(), Partial()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.gate = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.register_buffer("offset", torch.linspace(-1, 1, 6))

    def forward(self, x):
        return self.down(torch.relu(self.gate(x)) * self.up(x)) + self.offset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x + self.mlp(x))


def model_and_twin():
    torch.manual_seed(3)
    model = Model().double()
    twin = Model().double()
    twin.load_state_dict(model.state_dict())
    return model, twin


def mesh2x2():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


COLWISE = (R, Shard(0))
ROWWISE = (R, Shard(1))


def check_same(model, twin):
    for (name, parameter), (_, plain) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert isinstance(parameter, DTensor), name
        assert parameter.grad.placements == parameter.placements, name
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.grad, msg=name)


@pytest.mark.ranks(4)
def test_mesh_and_sharding_plan():
    model, twin = model_and_twin()
    mesh = mesh2x2()
    x = torch.randn(5, 6, dtype=torch.float64)
    plan = ShardingPlan(
        plan={"mlp.[ug]*.weight": COLWISE, "mlp.[ug]*.bias": COLWISE, "mlp.down.weight": ROWWISE},
        input_plan={"input": ([Shard(0), R],)},
        output_plan={"head.output": [R, R]},
    )
    returned = shard_module(model, mesh, plan)
    assert returned is model
    out = model(distribute_tensor(x, mesh, [R, R]))
    expected = twin(x)
    assert out.placements == (R, R)
    torch.testing.assert_close(out.full_tensor(), expected)
    out.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    check_same(model, twin)


@pytest.mark.ranks(4)
def test_dict_plan_with_layouts_that_carry_their_mesh():
    model, twin = model_and_twin()
    layout = Layout((2, 2), ("dp", "tp"))
    plan = {
        "forward": {
            "input": (layout("dp", "None"),),
            "mlp.down.input": (layout("dp", "tp"),),
            "output": layout("None", "None"),
        },
        "parameter": {
            "mlp.up.weight": layout("tp", "None"),
            "mlp.up.bias": layout("tp"),
            "mlp.gate.weight": layout("tp", "None"),
            "mlp.gate.bias": layout("tp"),
            "mlp.down.weight": layout("None", "tp"),
        },
    }
    shard_module(model, plan)
    x = torch.randn(5, 6, dtype=torch.float64)
    out = model(distribute_tensor(x, layout("None", "None")))
    torch.testing.assert_close(out.full_tensor(), twin(x))
    out.pow(2).sum().backward()
    twin(x).pow(2).sum().backward()
    check_same(model, twin)


@pytest.mark.ranks(4)
def test_sequence_parallel_boundaries_cost_one_gather_and_one_scatter_each_way():
    model, twin = model_and_twin()
    mesh = mesh2x2()
    plan = ShardingPlan(
        plan={"mlp.up.*": COLWISE, "mlp.gate.*": COLWISE, "mlp.down.weight": ROWWISE},
        input_plan={"mlp": ([Shard(0), R],), "head": ([Shard(0), Shard(0)],)},
        output_plan={"mlp": [Shard(0), Shard(0)]},
    )
    # The gather is asked for as varying by the plan of the module that holds the sharded parameters.
    shard_module(model, mesh, plan)
    x = torch.randn(8, 6, dtype=torch.float64)
    dx = distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    with CommTrace() as trace:
        out = model(dx)
        loss = out.pow(2).sum()
    torch.testing.assert_close(out.full_tensor(), twin(x))
    assert trace.counts == {"all_gather": 1, "reduce_scatter": 1}
    loss.backward()
    twin(x).pow(2).sum().backward()
    check_same(model, twin)


@pytest.mark.ranks(4)
def test_tied_parameters_stay_tied_and_get_one_gradient():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6, bias=False)
            self.b = nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(1)
    model = Tied().double()
    twin = Tied().double()
    twin.load_state_dict(model.state_dict())
    shard_module(model, mesh2x2(), ShardingPlan(plan={"a.weight": (R, Shard(0))}))
    assert model.a.weight is model.b.weight
    assert model.a.weight.placements == (R, Shard(0))
    x = torch.randn(4, 6, dtype=torch.float64)
    hidden = torch.tanh(model.a(distribute_tensor(x, mesh2x2(), [Shard(0), R])))
    model.b(hidden.redistribute(placements=[Shard(0), R])).pow(2).sum().backward()
    twin(x).pow(2).sum().backward()
    torch.testing.assert_close(model.a.weight.grad.full_tensor(), twin.a.weight.grad)


@pytest.mark.ranks(4)
def test_a_pattern_that_means_nothing_lists_near_misses():
    model, _ = model_and_twin()
    with pytest.raises(ValueError, match=r"mlp\.upp\.weight.*did you mean.*mlp\.up\.weight"):
        shard_module(model, mesh2x2(), ShardingPlan(plan={"mlp.upp.weight": COLWISE}))
    with pytest.raises(ValueError, match="no module"):
        shard_module(model, mesh2x2(), ShardingPlan(input_plan={"mpl.input": ([R, R],)}))
    with pytest.raises(TypeError, match="ShardingPlan or a dict"):
        shard_module(model, mesh2x2(), ["nonsense"])
    with pytest.raises(ValueError, match='"forward" and "parameter"'):
        shard_module(model, {"parameters": {}})


@pytest.mark.ranks(4)
def test_a_plain_batch_on_a_mesh_with_another_axis_than_tp_is_refused():
    model, _ = model_and_twin()
    shard_module(model, mesh2x2(), ShardingPlan(plan={"mlp.up.*": COLWISE}))
    with pytest.raises(ValueError, match=r"other axes than 'tp': \('dp',\)"):
        model(torch.randn(4, 6, dtype=torch.float64))


@pytest.mark.ranks(2)
def test_a_plain_batch_on_a_pure_tp_mesh_counts_as_replicated():
    model, twin = model_and_twin()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"mlp.up.*": [Shard(0)], "mlp.gate.*": [Shard(0)], "mlp.down.weight": [Shard(1)]}
    shard_module(model, mesh, ShardingPlan(plan=plan, return_local_tensor=True))
    x = torch.randn(4, 6, dtype=torch.float64)
    out = model(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, twin(x))


@pytest.mark.ranks(4)
def test_more_output_layouts_than_outputs_are_an_error():
    model, mesh = model_and_twin()[0], mesh2x2()
    shard_module(model, mesh, ShardingPlan(output_plan={"mlp": ([R, R], [R, R])}))
    with pytest.raises(ValueError, match="the plan lays out 2 outputs, it returned 1"):
        model(distribute_tensor(torch.randn(5, 6, dtype=torch.float64), mesh, [R, R]))


@pytest.mark.ranks(1)
def test_at_world_size_one_the_model_comes_back_as_it_is():
    model, _ = model_and_twin()
    layout = Layout((1, 1), ("dp", "tp"))
    before = dict(model.named_parameters())
    assert shard_module(model, {"parameter": {"mlp.up.weight": layout("tp", "None")}}) is model
    assert all(a is b for a, b in zip(before.values(), model.parameters(), strict=True))


@pytest.mark.ranks(4)
def test_parameters_come_from_rank_zero():
    torch.manual_seed(torch.distributed.get_rank())
    model = Model().double()
    weight = model.mlp.up.weight.detach().clone()
    torch.distributed.broadcast(weight, 0)
    shard_module(model, mesh2x2(), ShardingPlan(plan={"mlp.up.weight": COLWISE}))
    torch.testing.assert_close(model.mlp.up.weight.full_tensor().detach(), weight)
