"""``fully_shard`` on meshes of one to three axes, alone and over tensor and expert parallelism.

Every row trains a small model for some steps with SGD and clipping beside the same model on one device (one with AdamW
too, for its states): losses,
gradients, their norm and the updated parameters must be those of one device, the collectives and groups those of the
row. The one-device model is plain PyTorch. PyTorch's own ``fully_shard`` trains beside it where it can.
"""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from fully_shard_training import (
    LAYERS,
    WIDTH,
    WORDS,
    Layer,
    Model,
    Side,
    adamw,
    assert_near,
    loss_of,
    pair,
    part_over,
    sgd,
    tensor_parallel,
    train,
    wrap,
)
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    CommTrace,
    DTensor,
    MixedPrecisionPolicy,
    PackedShard,
    Replicate,
    Shard,
    ShardingPlan,
    all_gather,
    clip_grad_norm_,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    reduce_scatter,
    shard_module,
)

GATHERS, REDUCTIONS = 2 * LAYERS, LAYERS + 1  # of one step: the last layer and the root are gathered once


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("optimizer", "tolerance"), [(sgd, 1e-5), (adamw, 1e-3)])
def test_row_1_one_data_axis(optimizer, tolerance):
    plain, model = pair()
    theirs = wrap(copy.deepcopy(plain), torch_fully_shard, mesh=init_device_mesh("cpu", (4,)))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    wrap(model, mesh=mesh)
    how = {"optimizer": optimizer, "tolerance": tolerance}
    trace = train(model, plain, part_over(mesh, "fsdp"), others=[theirs], **how)[-1]
    assert trace.counts == {"all_gather": GATHERS, "reduce_scatter": REDUCTIONS}
    for param in model.hsdp_params.values():
        assert param.sharded_group_info.ranks == (0, 1, 2, 3)
        assert (param.rank_size, param.shard_size, param.dp_size) == (4, 4, 1)


@pytest.mark.ranks(4)
def test_row_2_replicas_of_shards():
    plain, model = pair()
    nameless = init_device_mesh("cpu", (2, 2))
    theirs = wrap(
        copy.deepcopy(plain), torch_fully_shard, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    )
    wrap(model, mesh=nameless)
    rank = dist.get_rank()
    trace = train(model, plain, lambda batch: batch.chunk(4)[rank], others=[theirs])[-1]
    assert trace.counts == {"all_gather": GATHERS, "reduce_scatter": REDUCTIONS, "all_reduce": REDUCTIONS}
    param = model.hsdp_params["head.weight"]
    assert param.sharded_group_info.ranks == ((0, 1), (2, 3))[rank // 2]
    assert param.unsharded_group_info.ranks == ((0, 2), (1, 3))[rank % 2]
    assert (param.rank_size, param.shard_size, param.dp_size) == (4, 2, 2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("given", ["the whole mesh", "its data axis"])
def test_row_3_data_and_tensor_parallel(given):
    plain, model = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    wrap(model, mesh=mesh if given == "the whole mesh" else mesh["dp"])
    up = model.layers[0].mlp.up.weight
    assert up.layout.alias_tensor_map == (("tp", "dp"), "None")  # 18 rows: 9 per tp rank, of which 5 and 4
    assert model.layers[0].mlp.down.weight.layout.alias_tensor_map == ("dp", "tp")
    trace = train(model, plain, part_over(mesh, "dp"))[-1]
    data = [e for e in trace.events if e.op in ("all_gather", "reduce_scatter")]
    # Weights on (dp, tp) and plain ones on dp have groups with the same ranks, so they travel together.
    assert len(data) == GATHERS + REDUCTIONS
    assert {e.ranks for e in data} == {2}
    assert trace.counts["all_reduce"] == 2 * LAYERS  # those of tensor parallelism alone


@pytest.mark.ranks(4)
def test_row_3_laid_out_batch():
    plain, model = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    up, down = [Replicate(), Shard(0)], [Replicate(), Shard(1)]
    plan = {"layers.*.mlp.up.*": up, "layers.*.mlp.down.weight": down}
    shard_module(model, mesh, ShardingPlan(plan=plan, input_plan={"": [Shard(0), Replicate()]}), src_data_rank=None)
    wrap(model, mesh=mesh)
    trace = train(model, plain, lambda b: distribute_tensor(b, mesh, [Shard(0), Replicate()], src_data_rank=None))[-1]
    assert trace.phase("backward") == {
        "all_gather": LAYERS - 1, "reduce_scatter": REDUCTIONS, "all_reduce": LAYERS,
    }  # fmt: skip
    # Forward: one for each row-parallel layer and the scalars of the loss.
    assert trace.phase("forward") == {"all_gather": REDUCTIONS, "all_reduce": LAYERS + 1}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recompute", [False, True])
def test_row_3_sequence_parallel_laid_out_batch(recompute):
    plain, model = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if recompute:
        for layer in model.layers:
            layer.mlp = CheckpointWrapper(layer.mlp)
    inner = "layers.*.mlp.inner" if recompute else "layers.*.mlp"
    data, sequence = [Shard(0), Replicate()], [Shard(0), Shard(1)]
    plan = ShardingPlan(
        plan={f"{inner}.up.*": [Replicate(), Shard(0)], f"{inner}.down.weight": [Replicate(), Shard(1)]},
        input_plan={"": data, inner: data, "layers.0": sequence, "head": data},
        output_plan={inner: sequence},
    )
    unwrapped = shard_module(copy.deepcopy(model), mesh, plan, src_data_rank=None)
    wrap(shard_module(model, mesh, plan, src_data_rank=None), mesh=mesh)

    def laid_out(batch):
        return distribute_tensor(batch, mesh, data, src_data_rank=None)

    trace = train(model, plain, laid_out, steps=3)[-1]
    with CommTrace() as alone:
        loss_of(unwrapped, *(laid_out(torch.zeros(8, 5, dtype=torch.int64)) for _ in range(2))).backward()

    def over_tp(events):
        return Counter((e.phase, e.op) for e in events if e.axes == (1,) and e.op != "all_reduce")

    # The fused collectives of sequence parallelism, whether the layers are wrapped or not.
    assert over_tp(trace.events) == over_tp(alone.events)
    assert over_tp(trace.events)["forward", "reduce_scatter"] == LAYERS
    assert over_tp(trace.events)["backward", "reduce_scatter"] == LAYERS
    # Norms work on pieces of the sequence: their gradients are summed over tp (unwrapped, over both axes at once).
    assert [e.axes for e in trace.events if e.op == "all_reduce" and e.phase == "backward"] == [(1,)] * 2 * LAYERS


class CheckpointWrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Experts(nn.Module):
    """Each token goes to the expert of its word's gate; on ``mesh``, every rank holds a part of the experts."""

    mesh = None

    def __init__(self, count=4):
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.weight = nn.Parameter(torch.randn(count, WIDTH, WIDTH) * 0.3)

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)
        first, weight = 0, self.weight
        if self.mesh is not None:
            weight = weight.to_local()
            first = self.mesh.get_local_rank() * len(weight)
            x = all_gather(x, self.mesh, varying=True)
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(weight.unbind()):
            out = out + torch.where((chosen == first + i)[:, None], x @ expert * scores[:, first + i, None], 0.0)
        if self.mesh is not None:
            out = reduce_scatter(out, self.mesh)
        return out.view(shape)


class ExpertLayer(Layer):
    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        return super().forward(x) + self.experts(self.norm(x))


@pytest.mark.ranks(8, timeout=300)
def test_row_4_data_tensor_and_expert_parallel():
    plain, model = pair(ExpertLayer)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "ep"))
    tensor_parallel(model, mesh["tp"])
    for layer in model.layers:
        experts = layer.experts
        experts.mesh = mesh["ep"]
        experts.weight = nn.Parameter(
            distribute_tensor(experts.weight.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
        )
    wrap(model, mesh=mesh)
    own = {name.rpartition("layers.0.")[2]: p for name, p in model.layers[0].hsdp_params.items()}
    expert, gate, up = own["experts.weight"], own["experts.gate.weight"], own["mlp.up.weight"]
    assert expert.sharded.layout.alias_tensor_map == (("ep", "dp"), "None", "None")
    assert (expert.groups.reduction, expert.sharded_group_info.axes) == (("reduce_scatter",), ("dp",))
    for param in (gate, up):
        assert param.groups.reduction == ("reduce_scatter", "all_reduce")
        assert (param.sharded_group_info.axes, param.unsharded_group_info.axes) == (("dp",), ("ep",))
    assert up.sharded.layout.alias_tensor_map == (("tp", "dp"), "None")
    here = dict(zip(("dp", "tp", "ep"), mesh.get_coordinate(), strict=True))
    assert up.unsharded_group_info.ranks == tuple(4 * here["dp"] + 2 * here["tp"] + i for i in range(2))
    # The ranks of ep have different data; those of tp the same.
    train(model, plain, part_over(mesh, "dp", "ep"))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("told", [True, False], ids=["row 5, explicit", "row 6, inferred"])
def test_rows_5_and_6_only_tensor_parallel(told):
    plain, model = pair()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    tensor_parallel(model, mesh)
    wrap(model, mesh=mesh, enable_param_shard=False if told else None)
    trace = train(model, plain, lambda batch: batch)[-1]
    assert trace.counts == {"all_reduce": 2 * LAYERS}  # those of tensor parallelism
    for layer in model.layers:
        for param in layer.hsdp_params.values():
            assert param.groups.reduction == ()
            assert (param.rank_size, param.shard_size, param.dp_size) == (1, 1, 1)
            assert param.sharded_group_info.ranks == param.unsharded_group_info.ranks == (dist.get_rank(),)


@pytest.mark.ranks(4)
def test_row_6_the_tensor_parallel_part_of_a_larger_mesh():
    plain, model = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    wrap(model, mesh=mesh["tp"])
    trace = train(model, plain, part_over(mesh, "dp"))[-1]
    assert trace.counts["all_gather"] == trace.counts["reduce_scatter"] == 0
    assert {(e.axes, e.ranks) for e in trace.events} == {((0,), 2)}  # tp's own mesh, and axis dp of the whole
    param = model.layers[0].hsdp_params["mlp.up.weight"]
    assert param.groups.reduction == ("all_reduce",)
    assert param.unsharded_group_info.axes == ("dp",)


@pytest.mark.ranks(4)
def test_row_7_a_whole_mesh_is_not_mistaken_for_tensor_parallelism():
    plain, model = pair()
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    tensor_parallel(model, mesh["tp"])
    wrap(model, mesh=mesh)
    param = model.layers[0].hsdp_params["mlp.up.weight"]
    assert (param.shard_size, param.groups.reduction) == (2, ("reduce_scatter",))
    assert param.sharded.placements == (Replicate(), Shard(0), Shard(0))
    train(model, plain, part_over(mesh, "dp_shard"), steps=2)


@pytest.mark.ranks(4)
def test_row_8_mixed_precision():
    plain, model = pair()
    theirs = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

    assert MixedPrecisionPolicy is TorchPolicy
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap(model, mesh=mesh, mp_policy=policy)
    wrap(theirs, torch_fully_shard, mesh=mesh, mp_policy=policy)
    part = part_over(mesh, "fsdp")
    ours, others = Side(model, clip_grad_norm_), Side(theirs, nn.utils.clip_grad_norm_)
    for step in range(3):
        ids, labels = (torch.randint(0, WORDS, (8, 5), generator=torch.Generator().manual_seed(s)) for s in (step, 9))
        with CommTrace() as trace:
            ours.backward(lambda: loss_of(model, part(ids), part(labels)))  # noqa: B023
        others.backward(lambda: loss_of(theirs, part(ids), part(labels)))  # noqa: B023
        assert trace.counts["reduce_scatter"] == REDUCTIONS
        torch.testing.assert_close(ours.step(), others.step())
        for got, want in zip(model.parameters(), theirs.parameters(), strict=True):
            assert (got.dtype, got.grad.dtype) == (torch.float32, torch.float32)
            torch.testing.assert_close(got.grad.full_tensor(), want.grad.full_tensor(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got.detach().full_tensor(), want.detach().full_tensor(), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(4)
def test_row_9_accumulation():
    plain, model = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    wrap(model, mesh=mesh)
    part = part_over(mesh, "dp")
    ours, theirs = Side(model, clip_grad_norm_), Side(plain, nn.utils.clip_grad_norm_)
    for step in range(3):
        batches = torch.randint(0, WORDS, (3, 2, 8, 5), generator=torch.Generator().manual_seed(step))
        theirs.backward(*(lambda b=b: loss_of(plain, *b) / 3 for b in batches))
        ours.optimizer.zero_grad()
        for micro, (ids, labels) in enumerate(batches):
            model.set_requires_gradient_sync(micro == 2)
            with CommTrace() as trace:
                (loss_of(model, part(ids), part(labels)) / 3).backward()
            assert bool(trace.counts["reduce_scatter"]) == (micro == 2)
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=0, atol=1e-5)
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert_near(got.detach(), want.detach(), 1e-5, "a parameter")


@pytest.mark.ranks(4)
def test_row_10_state_dict_round_trip():
    plain, model = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    wrap(model, mesh=mesh)
    part = part_over(mesh, "dp")
    train(model, plain, part, steps=2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(isinstance(value, DTensor) for value in saved.values())
    for (name, value), want in zip(saved.items(), plain.state_dict().values(), strict=True):
        assert value.layout is model.get_parameter(name).layout
        assert_near(value, want, 1e-5, name)
    _, other = pair()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    tensor_parallel(other, mesh["tp"])
    wrap(other, mesh=mesh)
    other(part(torch.zeros(8, 5, dtype=torch.int64)))  # after a forward, in which the shards were gathered
    other.load_state_dict(saved)
    train(other, plain, part, steps=2)
    _, assigned = pair()
    tensor_parallel(assigned, mesh["tp"])
    wrap(assigned, mesh=mesh)
    assigned.load_state_dict(other.state_dict(), assign=True)
    train(assigned, plain, part, steps=2)


@pytest.mark.ranks(4)
def test_meta_device_and_conversions():
    plain, _ = pair()
    with torch.device("meta"):
        model = Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    wrap(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.copy_(distribute_tensor(value.detach(), parameter.layout, src_data_rank=None))
    train(model, plain, part_over(mesh, "dp"), steps=2)
    train(model.double(), plain.double(), part_over(mesh, "dp"), steps=2)


@pytest.mark.ranks(4)
def test_packed_weights():
    plain, model = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = model.layers[0].mlp.up.weight
    packed = PackedShard(0, (6, 7, 5))  # each section uneven
    model.layers[0].mlp.up.weight = nn.Parameter(
        distribute_tensor(weight.detach(), mesh, [Replicate(), packed], src_data_rank=None)
    )
    fully_shard(model, mesh=mesh)
    sharded = model.layers[0].mlp.up.weight
    assert sharded.layout.alias_tensor_map == (("tp", "dp"), "None")
    torch.testing.assert_close(sharded.detach().full_tensor(), plain.layers[0].mlp.up.weight.detach())
    model.unshard()
    assert model.layers[0].mlp.up.weight.placements == (packed,)
    model.reshard()
    torch.testing.assert_close(sharded.detach().full_tensor(), plain.layers[0].mlp.up.weight.detach())
