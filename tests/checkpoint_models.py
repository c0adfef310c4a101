"""For the checkpoint tests: a model with every kind of entry that a state dict can have, its layouts, its training."""

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DTensor, Layout, PackedShard, Replicate, Shard, redistribute_policy
from hyper_parallel.tensor.distribute import as_parameter
from hyper_parallel.testing.placing import make, mesh_of

STEPS = 6


class Net(nn.Module):
    """Uneven shapes, a packed weight, a tied one, a frozen one, one that is not used, a 0-dim buffer, a bf16 one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.gate_up = nn.Linear(6, 14)
        self.down = nn.Linear(7, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.low = nn.Parameter(torch.randn(6).to(torch.bfloat16))
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("table", torch.randn(2, 6))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        gate, up = self.gate_up(h).split(7, -1)
        h = h + self.down(F.silu(gate) * up) * self.scale + self.frozen + self.low.float()
        return self.head(h + self.table.sum(0))


# Placements per parameter and order of shards where it is not that of the mesh; everything else is Replicate.
LAYOUTS = {
    "one rank": None,
    "fsdp": ((None,), {"*": [Shard(0)]}, {}),
    "fsdp on dim 1": ((None,), {"*.weight": [Shard(1)], "*": [Shard(0)]}, {}),
    "tp": ((None,), {"gate_up.*": [PackedShard(0, (7, 7))], "down.weight": [Shard(1)], "embed.weight": [Shard(0)]}, {}),
    "fsdp x tp": (
        (2, None),
        {
            "gate_up.*": [Shard(0), PackedShard(0, (7, 7))],
            "down.weight": [Shard(0), Shard(1)],
            "embed.weight": [Shard(0), Shard(0)],
            "*": [Shard(0), Replicate()],
        },
        {"embed.weight": {0: (1, 0)}},
    ),
    "replicas": ((2, None), {"*": [Replicate(), Shard(0)]}, {}),
}


def build(seed, plan, world):
    """The model with the layouts of a plan over ``world`` ranks."""
    torch.manual_seed(seed)
    net = Net()
    if LAYOUTS[plan] is None:
        return net
    shape, placements, orders = LAYOUTS[plan]
    mesh = mesh_of(tuple(world // (2 if len(shape) == 2 else 1) if size is None else size for size in shape))
    tied = None
    for name, parameter in list(net.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        value = make(parameter.detach(), mesh, layout_of(name, parameter, mesh, placements, orders))
        setattr(net.get_submodule(owner), leaf, as_parameter(value, parameter))
        tied = getattr(net.get_submodule(owner), leaf) if name == "embed.weight" else tied
    net.head.weight = tied
    for name, buffer in list(net.named_buffers()):
        setattr(net, name, make(buffer, mesh, [Replicate()] * mesh.ndim))
    return net


def layout_of(name, parameter, mesh, placements, orders):
    wanted = next((p for pattern, p in placements.items() if matches(name, pattern)), [Replicate()] * mesh.ndim)
    fixed = [p if not isinstance(p, Shard) or p.dim < parameter.ndim else Replicate() for p in wanted]
    return Layout.from_placements(mesh, fixed, ndim=parameter.ndim, shard_order=orders.get(name))


def matches(name, pattern):
    return (
        pattern == "*"
        or name == pattern
        or (pattern.startswith("*") and name.endswith(pattern[1:]))
        or (pattern.endswith("*") and name.startswith(pattern[:-1]))
    )


def optimizer_of(net, kind="adamw"):
    """Two groups; the tied, the frozen and the unused parameter are among them."""
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.03}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.02)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.2)


def train(net, optimizer, steps):
    """The losses of these steps; every rank works on the same batch."""
    losses = []
    for step in steps:
        tokens = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(step))
        weight = net.embed.weight
        if isinstance(weight, DTensor):
            tokens = make(tokens, weight.layout.mesh, [Replicate()] * weight.layout.mesh.ndim)
        with redistribute_policy("auto"):
            logits = net(tokens)
            loss = F.cross_entropy(logits.reshape(-1, 11), tokens.roll(-1, 1).reshape(-1))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_state(state):
    """A copy of every tensor of a nested state dict, whole, by path; all ranks call it."""
    found = {}

    def walk(value, path):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}")
        elif isinstance(value, DTensor):
            found[path] = value.full_tensor().clone()
        elif isinstance(value, torch.Tensor):
            found[path] = value.clone()

    walk(state, "")
    return found


def same_tensors(got, want):
    assert got.keys() == want.keys()
    for name in got:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name
