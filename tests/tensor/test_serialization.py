"""DTensors through pickle, ``copy``, ``torch.save`` and ``torch.distributed.checkpoint``."""

import copy
import io
import pickle
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from hyper_parallel import DTensor, Layout, PackedShard, Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make


def whole(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + 1


def layouts_of(ndim):
    """Layouts on two meshes: plain, over two axes in either order, packed, replicated."""
    flat, grid = mesh_of((4,)), mesh_of((2, 2))
    return [
        Layout.from_placements(flat, [Shard(0)], ndim=ndim),
        Layout.from_placements(flat, [Shard(1)], ndim=ndim),
        Layout.from_placements(flat, [PackedShard(0, (5, 2))], ndim=ndim),
        Layout.from_placements(flat, [Replicate()], ndim=ndim),
        Layout.from_placements(grid, [Shard(0), Shard(1)], ndim=ndim),
        Layout.from_placements(grid, [Shard(0), Shard(0)], ndim=ndim),
        Layout.from_placements(grid, [Shard(0), Shard(0)], ndim=ndim, shard_order={0: ("tp", "dp")}),
        Layout.from_placements(grid, [Shard(0), PackedShard(0, (5, 2))], ndim=ndim),
        Layout.from_placements(grid, [Replicate(), Shard(1)], ndim=ndim),
    ]


def same(got, want):
    assert isinstance(got, DTensor)
    assert got is not want
    assert got.layout is want.layout
    assert (got.shape, got.stride(), got.dtype, got.requires_grad) == (
        want.shape,
        want.stride(),
        want.dtype,
        want.requires_grad,
    )
    assert got.grad_placements == want.grad_placements
    assert type(got) is type(want)
    assert isinstance(got, nn.Parameter) == isinstance(want, nn.Parameter)
    assert torch.equal(got.to_local(), want.to_local())
    assert (
        got.to_local().untyped_storage().data_ptr() != want.to_local().untyped_storage().data_ptr()
        or not got.to_local().numel()
    )


# -- pickle, copy, torch.save -------------------------------------------------------------------------------------


def through_torch_save(weights_only):
    def run(tensor):
        file = io.BytesIO()
        torch.save({"tensor": tensor, "step": 3}, file)
        file.seek(0)
        return torch.load(file, weights_only=weights_only)["tensor"]

    return run


WAYS = {
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch_save(False),
    "torch.save, weights_only": through_torch_save(True),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_the_layout_and_the_values(way):
    copied = WAYS[way]
    for layout in layouts_of(2):
        for requires_grad in (False, True):
            x = make(whole(7, 3), layout.mesh, layout, requires_grad=requires_grad)
            same(copied(x), x)
            parameter = nn.Parameter(x, requires_grad=requires_grad)
            same(copied(parameter), parameter)
    pending = make(whole(7, 3), mesh_of((2, 2)), [Partial(), Shard(0)])
    same(copied(pending), pending)
    varying = make(whole(7, 3), mesh_of((2, 2)), [Replicate(), Shard(0)], varying=[0])
    same(copied(varying), varying)
    transposed = make(whole(7, 3).t(), mesh_of((2, 2)), [Shard(1), Replicate()])
    same(copied(transposed), transposed)
    scalar = make(torch.tensor(2.5), mesh_of((2, 2)), [Replicate(), Replicate()])
    same(copied(scalar), scalar)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_works_like_the_original(way):
    x = nn.Parameter(make(whole(7, 3), mesh_of((2, 2)), [Shard(0), Shard(1)]))
    y = WAYS[way](x)
    (y * x.detach()).sum().backward()
    assert x.grad is None
    assert torch.equal(y.grad.full_tensor(), whole(7, 3))
    with torch.no_grad():
        y.zero_()
    assert torch.equal(x.detach().full_tensor(), whole(7, 3))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_users_attributes_go_along_and_the_librarys_own_do_not(way):
    x = nn.Parameter(make(whole(7, 3), mesh_of((4,)), [Shard(0)]))
    x.tag = "expert"
    pending = make(whole(7, 3), mesh_of((4,)), [Partial()])
    pending.reduce_partial()  # remembered
    assert WAYS[way](x).tag == "expert"
    copied = WAYS[way](pending)
    assert copied._memo is None
    with torch.no_grad():
        copied.zero_()
    assert not copied.reduce_partial().full_tensor().any()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_layouts_and_placements_travel_too(way):
    for layout in layouts_of(2):
        assert WAYS[way](layout) is layout
    described = Layout((2, 2), ("dp", "tp"))
    assert WAYS[way](described("dp", "None")) == described("dp", "None")
    placements = [Shard(1), Replicate(), Partial("max"), PackedShard(0, (5, 2))]
    assert WAYS[way](placements) == placements


@pytest.mark.ranks(4)
def test_deepcopy_copies_the_gradient_and_respects_the_memo():
    x = nn.Parameter(make(whole(7, 3), mesh_of((4,)), [Shard(0)]))
    (x * 2).sum().backward()
    one, two = copy.deepcopy([x, x])
    assert one is two
    assert torch.equal(one.grad.full_tensor(), x.grad.full_tensor())
    one.grad.zero_()
    assert x.grad.full_tensor().all()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)


@pytest.mark.ranks(4)
def test_copy_copy_shares_the_memory():
    x = make(whole(7, 3), mesh_of((4,)), [Shard(0)])
    y = copy.copy(x)
    assert y is not x
    assert y.layout is x.layout
    y.mul_(2)
    assert torch.equal(x.full_tensor(), 2 * whole(7, 3))


@pytest.mark.ranks(4)
def test_tied_parameters_stay_tied_in_a_saved_state():
    weight = nn.Parameter(make(whole(7, 3), mesh_of((4,)), [Shard(0)]))
    one, two = through_torch_save(True)({"a": weight, "b": weight}).values()
    assert one is two


@pytest.mark.ranks(4)
def test_loading_onto_another_device_keeps_the_layout():
    x = make(whole(7, 3), mesh_of((4,)), [Shard(0)])
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=True)
    assert loaded.is_meta
    assert (loaded.layout, loaded.shape) == (x.layout, x.shape)


# -- torch.distributed.checkpoint ---------------------------------------------------------------------------------


class Folder:
    """A folder that all ranks see, removed at the end."""

    def __enter__(self):
        path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(path)
        self.path = path[0]
        return self.path

    def __exit__(self, *error):
        if error[0] is None:
            dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)


@pytest.mark.ranks(4, timeout=240)
def test_a_checkpoint_loads_into_any_other_layout_and_mesh():
    layouts = layouts_of(2)
    value = whole(7, 3)
    with Folder() as path:
        dcp.save(
            {f"w{i}": make(value * (i + 1), layout.mesh, layout) for i, layout in enumerate(layouts)},
            checkpoint_id=path,
        )
        for shift in (0, 1, 4):
            targets = [layouts[(i + shift) % len(layouts)] for i in range(len(layouts))]
            state = {f"w{i}": make(0 * value, layout.mesh, layout) for i, layout in enumerate(targets)}
            dcp.load(state, checkpoint_id=path)
            for i, layout in enumerate(targets):
                assert state[f"w{i}"].layout is layout
                assert torch.equal(state[f"w{i}"].full_tensor(), value * (i + 1))


@pytest.mark.ranks(4)
def test_plain_tensors_and_dtensors_load_each_others_checkpoints():
    value = whole(7, 3)
    placed = make(value, mesh_of((4,)), [Shard(0)])
    with Folder() as path:
        dcp.save({"w": placed, "step": torch.tensor(3), "name": "x"}, checkpoint_id=path)
        state = {"w": torch.zeros(7, 3, dtype=torch.float64), "step": torch.tensor(0), "name": ""}
        dcp.load(state, checkpoint_id=path)
        assert torch.equal(state["w"], value)
        assert (int(state["step"]), state["name"]) == (3, "x")
    with Folder() as path:
        dcp.save({"w": value}, checkpoint_id=path)
        state = {"w": make(0 * value, mesh_of((2, 2)), [Shard(1), Shard(0)])}
        dcp.load(state, checkpoint_id=path)
        assert torch.equal(state["w"].full_tensor(), value)


@pytest.mark.ranks(4)
def test_empty_shards_scalars_and_replicas():
    mesh = mesh_of((2, 2))
    state = {
        "short": make(whole(1, 2), mesh, [Shard(0), Shard(0)]),
        "none": make(whole(0, 2), mesh, [Shard(0), Replicate()]),
        "scalar": make(torch.tensor(2.5), mesh, [Replicate(), Replicate()]),
    }
    with Folder() as path:
        dcp.save(state, checkpoint_id=path)
        loaded = {n: make(0 * t.full_tensor(), mesh, [Replicate(), Replicate()]) for n, t in state.items()}
        dcp.load(loaded, checkpoint_id=path)
        for name, tensor in state.items():
            assert torch.equal(loaded[name].full_tensor(), tensor.full_tensor())


@pytest.mark.ranks(4)
def test_a_pending_sum_is_not_saved():
    with Folder() as path, pytest.raises(dcp.api.CheckpointException, match="can neither be saved nor"):
        dcp.save({"w": make(whole(7, 3), mesh_of((4,)), [Partial()])}, checkpoint_id=path)


@pytest.mark.ranks(4)
def test_a_pending_sum_is_not_loaded_into():
    with Folder() as path:
        dcp.save({"w": make(whole(7, 3), mesh_of((4,)), [Shard(0)])}, checkpoint_id=path)
        with pytest.raises(dcp.api.CheckpointException, match="neither be saved nor loaded into"):
            dcp.load({"w": make(whole(7, 3), mesh_of((4,)), [Partial()])}, checkpoint_id=path)


@pytest.mark.ranks(4, timeout=240)
def test_an_asynchronous_save_holds_the_values_of_its_start():
    layouts = layouts_of(2)
    state = {f"w{i}": make(whole(7, 3) * (i + 1), layout.mesh, layout) for i, layout in enumerate(layouts)}
    state["transposed"] = make(whole(7, 3).t(), mesh_of((2, 2)), [Shard(1), Replicate()])
    want = {name: tensor.full_tensor().clone() for name, tensor in state.items()}
    with Folder() as path:
        saving = dcp.async_save(state, checkpoint_id=path)
        for tensor in state.values():
            tensor.zero_()
        saving.result()
        dcp.load(state, checkpoint_id=path)
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor(), want[name])


# -- torch.distributed.checkpoint.state_dict ----------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 6, dtype=torch.float64)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(self.fc(x)) * self.scale


def training(weight, bias, seed=0):
    torch.manual_seed(seed)
    net = Net()
    mesh = mesh_of((4,))
    net.fc.weight = nn.Parameter(distribute_tensor(net.fc.weight.detach(), mesh, [weight]))
    net.fc.bias = nn.Parameter(distribute_tensor(net.fc.bias.detach(), mesh, [bias]))
    net.scale = distribute_tensor(net.scale, mesh, [Replicate()])
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def step(net, optimizer):
    optimizer.zero_grad()
    net(make(whole(5, 3) / 15, mesh_of((4,)), [Replicate()])).square().sum().backward()
    optimizer.step()


def check_equal(net, other):
    for got, want in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(got.detach().full_tensor(), want.detach().full_tensor())


@pytest.mark.ranks(4, timeout=240)
def test_model_and_optimizer_resume_in_another_layout():
    net, optimizer = training(Shard(0), Shard(0))
    step(net, optimizer)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    assert all(isinstance(v, DTensor) for v in model_state.values())
    with Folder() as path:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        resumed, its_optimizer = training(Replicate(), Replicate(), seed=1)
        model_state, optimizer_state = get_state_dict(resumed, its_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(resumed, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check_equal(resumed, net)
    for _ in range(2):
        step(net, optimizer)
        step(resumed, its_optimizer)
    for got, want in zip(resumed.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach().full_tensor())
    assert resumed.fc.weight.placements == (Replicate(),)


@pytest.mark.ranks(4)
def test_model_state_dict_round_trip():
    net, _ = training(Shard(0), Shard(0))
    other, _ = training(Shard(0), Shard(0), seed=1)
    state = get_model_state_dict(net)
    assert sorted(state) == ["fc.bias", "fc.weight", "scale"]
    set_model_state_dict(other, state)
    check_equal(other, net)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_torchs_full_state_dict_holds_whole_tensors(cpu_offload):
    net, optimizer = training(Shard(0), Shard(0))
    step(net, optimizer)
    want = {name: value.full_tensor() for name, value in net.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    model_state, optimizer_state = get_state_dict(net, optimizer, options=options)
    if cpu_offload and dist.get_rank():
        assert (model_state, optimizer_state) == ({}, {})
        return
    for name, value in want.items():
        assert type(model_state[name]) is torch.Tensor
        assert torch.equal(model_state[name], value)
    assert type(optimizer_state["state"]["fc.weight"]["exp_avg"]) is torch.Tensor
    assert optimizer_state["state"]["fc.weight"]["exp_avg"].shape == (6, 3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("broadcast", [False, True])
def test_torchs_set_state_dict_takes_a_full_state_dict(broadcast):
    net, optimizer = training(Shard(0), Shard(0))
    step(net, optimizer)
    model_state, optimizer_state = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    other, its_optimizer = training(Shard(1), Replicate(), seed=1)
    if broadcast and dist.get_rank():
        model_state, optimizer_state = {}, {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(other, model_state, options=options)
    # PyTorch's helpers do not copy the step counts.
    set_optimizer_state_dict(other, its_optimizer, copy.deepcopy(optimizer_state), options=options)
    check_equal(other, net)
    assert other.fc.weight.placements == (Shard(1),)
    step(net, optimizer)
    step(other, its_optimizer)
    for got, want in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach().full_tensor())
