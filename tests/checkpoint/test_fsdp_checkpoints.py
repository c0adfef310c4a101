"""Checkpoints of ``fully_shard`` models, with and without tensor parallelism, over meshes and world sizes."""

import pytest
import torch
import torch.distributed as dist
from checkpoint_models import same_tensors, whole_state
from torch import nn
from torch.nn import functional as F

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    RowwiseParallel,
    Shard,
    clip_grad_norm_,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    load,
    load_safetensors,
    save,
    save_safetensors,
    set_model_state_dict,
    set_state_dict,
)

STEPS = 6
TO_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 19), nn.Linear(19, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Uneven over 2 and 4 ranks, a tied head, a frozen parameter, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids):
        x = self.embed(ids) + self.frozen * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


meshes = {}


def mesh_for(kind):
    key = (kind, dist.group.WORLD)
    if key not in meshes:
        world = dist.get_world_size()
        shape, names = ((world,), ("fsdp",)) if kind == "fsdp" else ((world // 2, 2), ("dp", "tp"))
        meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return meshes[key]


def build(kind, seed, device="cpu"):
    torch.manual_seed(seed)
    with torch.device(device):
        net = Net()
    mesh = mesh_for(kind)
    for block in net.blocks:
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def optimizer_of(net):
    decayed, others = ([p for p in net.parameters() if (p.ndim > 1) == d and p.requires_grad] for d in (True, False))
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], lr=0.01)


def train(net, optimizer, steps, mesh=None):
    """Losses of the whole batch; each data rank works on its rows."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids, labels = (torch.randint(0, 11, (8, 5), generator=generator) for _ in range(2))
        if mesh is not None:
            ids, labels = (whole.chunk(mesh.shape[0])[mesh.get_coordinate()[0]] for whole in (ids, labels))
        loss = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(float(total))
    return losses


def run(kind, seed, source, target, last):
    """Go on from a checkpoint (from the beginning when there is none) and save."""
    net = build(kind, seed)
    optimizer = optimizer_of(net)
    model, optimizers = get_state_dict(net, optimizer)
    state = {"model": model, "optimizer": optimizers, "step": 0}
    if source is not None:
        load(state, checkpoint_id=source)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = train(net, optimizer, range(state["step"], last), mesh_for(kind))
    model, optimizers = get_state_dict(net, optimizer)
    save({"model": model, "optimizer": optimizers, "step": last}, checkpoint_id=target)
    return losses


@pytest.mark.parametrize(
    "route",
    [
        [("fsdp x tp", 4), ("fsdp", 2), ("fsdp x tp", 4)],
        [("fsdp", 2), ("fsdp x tp", 4), ("fsdp", 4)],
    ],
    ids=["4 tp, 2, 4 tp", "2, 4 tp, 4"],
)
def test_a_run_saved_on_one_mesh_and_resumed_on_another_has_the_losses_of_one_device(ranks, tmp_path, route):
    torch.manual_seed(0)
    plain = Net()
    want = train(plain, optimizer_of(plain), range(STEPS))
    losses = []
    for i, (kind, count) in enumerate(route):
        source = tmp_path / str(i - 1) if i else None
        every = ranks(count, run, kind, i, source, tmp_path / str(i), 2 * (i + 1))
        assert all(one == every[0] for one in every)
        losses += every[0]
    assert losses == pytest.approx(want, abs=1e-5)


@pytest.mark.ranks(4)
def test_a_state_dict_is_sharded_also_while_parameters_are_whole():
    net = build("fsdp x tp", 0)
    net.unshard()
    net.blocks[0].unshard()
    state = get_model_state_dict(net)
    assert state["blocks.0.up.weight"].layout.alias_tensor_map == (("tp", "dp"), "None")
    assert all(isinstance(value, DTensor) for name, value in state.items() if name != "scale")
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())


@pytest.mark.ranks(4)
def test_whole_on_rank_0_and_back_into_another_mesh():
    net = build("fsdp x tp", 0)
    torch.manual_seed(0)
    plain = Net()
    state = get_model_state_dict(net, options=TO_RANK_0)
    if dist.get_rank() == 0:
        same_tensors(whole_state(state), whole_state(plain.state_dict()))
    other = build("fsdp", 1)
    other.blocks[0].unshard()  # what is loaded must count although the whole parameter is there
    set_model_state_dict(other, state, options=FROM_RANK_0)
    ids = torch.randint(0, 11, (2, 5))
    torch.testing.assert_close(other(ids), plain(ids))
    assert other.embed.weight.placements == (Shard(0),)
    assert not other.frozen.requires_grad


@pytest.mark.ranks(4)
def test_safetensors_into_a_model_from_the_meta_device(tmp_path):
    net = build("fsdp x tp", 0)
    train(net, optimizer_of(net), range(1), mesh_for("fsdp x tp"))
    save_safetensors(net, tmp_path, max_shard_size=500)
    other = build("fsdp", 1, device="meta")
    other.to_empty(device="cpu")
    load_safetensors(other, tmp_path)  # also the head, which to_empty, as in PyTorch, gave a tensor of its own
    same_tensors(whole_state(other.state_dict()), whole_state(net.state_dict()))
    third = build("fsdp x tp", 2, device="meta")
    set_model_state_dict(third, get_model_state_dict(net, options=TO_RANK_0), options=FROM_RANK_0)
    same_tensors(whole_state(third.state_dict()), whole_state(net.state_dict()))
    assert third.head.weight is third.embed.weight
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    torch.testing.assert_close(third(ids), net(ids))
