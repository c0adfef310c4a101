"""What a cache leaves out of its key does not matter: a call after another one gives what it gives alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    custom_shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    redistribute_policy,
    shard_module,
)

R = Replicate()


def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ROWS = Shard(0)


def spread(*shape, place=ROWS, dtype=torch.float32, seed=0, grad=False, order=None):
    value = numbers(*shape, dtype=dtype, seed=seed)
    if order is not None:
        value = value.permute(order).contiguous().permute(order)  # an involution
        whole = distribute_tensor(value, mesh(), [R])
        return whole.permute(order).contiguous().permute(order).redistribute(placements=[place])
    return distribute_tensor(value, mesh(), [place]).requires_grad_(grad)


def piece(*shape, seed=0, dtype=torch.float32, grad=False):
    return numbers(*shape, seed=seed, dtype=dtype).requires_grad_(grad)


def forget():
    """As in a new process, but for the modules that were imported."""
    from hyper_parallel.api import module_boundary
    from hyper_parallel.comm import planner, redistribute
    from hyper_parallel.dispatch import dispatcher

    dispatcher.forget_rules()
    module_boundary._specs_taken.clear()
    for cached in (planner.plan_transition, redistribute.move_of, redistribute.target_spec):
        cached.cache_clear()


def styled(module, plan):
    torch.manual_seed(0)
    made = module()
    return parallelize_module(made, mesh(), plan)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(12, 8)

    def forward(self, x, scale=1.0, repeat=1, flip=False):
        for _ in range(repeat):
            x = self.down(self.drop(F.silu(self.up(self.norm(x))))) * scale
        return x.flip(-1) if flip else x


def by_styles():
    return styled(Mlp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_sequence():
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return styled(Mlp, plan)


def by_plan():
    torch.manual_seed(0)
    from hyper_parallel import Layout

    place = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    layouts = {n: Layout.from_placements(mesh(), [p], ndim=2 if n.endswith("weight") else 1) for n, p in place.items()}
    return shard_module(Mlp(), {"parameter": layouts})


def custom(t, other=None, n=3, flag=False, where=slice(None), dtype=None):
    t = t[:, :n][:, where]
    t = -t if flag else t
    t = t if other is None else t + other.sum()
    return t if dtype is None else t.to(dtype)


TENSORS = {
    "same": lambda: spread(6, 4),
    "longer": lambda: spread(7, 4),
    "wider": lambda: spread(6, 6),
    "short": lambda: spread(1, 4),
    "dtype": lambda: spread(6, 4, dtype=torch.float64),
    "half": lambda: spread(6, 4, dtype=torch.bfloat16),
    "whole": lambda: spread(6, 4, place=R),
    "columns": lambda: spread(6, 4, place=Shard(1)),
    "grad": lambda: spread(6, 4, grad=True),
    "values": lambda: spread(6, 4, seed=5),
    "turned": lambda: spread(6, 4, order=(1, 0)),
}
PIECES = {
    "same": lambda: piece(2, 4, 8),
    "longer": lambda: piece(2, 6, 8),
    "batch": lambda: piece(1, 4, 8),
    "flat": lambda: piece(4, 8),
    "grad": lambda: piece(2, 4, 8, grad=True),
    "values": lambda: piece(2, 4, 8, seed=5),
    "turned": lambda: piece(4, 2, 8).transpose(0, 1),
}
# Name -> (maker of the function, first arguments, other values of each argument by position or name).
PATHS = {
    "operator": (lambda: torch.sub, TENSORS, {"alpha": [1, 2, 0.5, True]}),
    "slice": (lambda: torch.Tensor.__getitem__, TENSORS, {1: [slice(0, 2), slice(1, 3), slice(0, 4, 2), 0, -1, None]}),
    "sum": (
        lambda: torch.sum,
        TENSORS,
        {"dim": [0, 1, (0, 1)], "keepdim": [False, True], "dtype": [torch.float64]},
    ),
    "cumsum": (lambda: torch.cumsum, TENSORS, {"dim": [0, 1, -2]}),
    "softmax": (lambda: F.softmax, TENSORS, {"dim": [0, 1], "dtype": [torch.float64]}),
    "to": (
        lambda: torch.Tensor.to,
        TENSORS,
        {1: [torch.float32, torch.float64], "copy": [False, True]},
    ),
    "pad": (lambda: F.pad, TENSORS, {1: [(0, 1), (1, 0), (0, 0, 0, 0)], "value": [0.0, 2.0]}),
    "linear": (lambda: lambda x, w: x @ w, TENSORS, {}),
    "custom_shard": (
        lambda: custom_shard(custom, mesh(), out_layouts=[Shard(0)], in_layouts={"t": [Shard(0)]}),
        TENSORS,
        {
            "n": [3, 2, 4],
            "flag": [False, True],
            "where": [slice(0, 2), slice(0, 3, 2)],
            "dtype": [torch.float64],
        },
    ),
    "styles": (by_styles, PIECES, {"scale": [1.0, 2.0], "repeat": [1, 2], "flip": [False, True]}),
    "sequence": (by_sequence, {k: v for k, v in PIECES.items() if k != "flat"}, {"scale": [2.0], "repeat": [2]}),
    "plan": (by_plan, PIECES, {"scale": [1.0, 2.0], "flip": [True]}),
}
SECOND = {"operator": (6, 4), "linear": (4, 5)}


def calls(name):
    """The arguments of calls that differ from the first in one argument each."""
    _, tensors, others = PATHS[name]
    given = [v[0] for k, v in others.items() if isinstance(k, int)]
    needed = {"dim": 0} if name in ("cumsum", "softmax") else {}

    def arguments(make, position=None, value=None, options=None):
        first = make()
        rest = list(given)
        if name in SECOND:
            rest = [spread(*SECOND[name], place=first.placements[0] if name == "operator" else R)]
            if rest[0].shape != first.shape and name == "operator":
                rest = [spread(*first.shape, place=first.placements[0])]
        if position is not None:
            rest[position - 1] = value
        return (first, *rest), {**needed, **(options or {})}

    yield from (lambda make=make: arguments(make) for make in tensors.values())
    same = tensors["same"]
    for key, values in others.items():
        for value in values:
            if isinstance(key, int):
                yield lambda key=key, value=value: arguments(same, key, value)
            else:
                yield lambda key=key, value=value: arguments(same, options={key: value})


def result(function, made, mode):
    """What a call gives, or the kind of its error, and its gradients."""
    args, options = made()
    torch.manual_seed(1)
    if isinstance(function, nn.Module):
        function.train(mode == "training")
        for parameter in function.parameters():
            parameter.grad = None
    modes = {"no_grad": torch.no_grad(), "autocast": torch.autocast("cpu", torch.bfloat16)}
    try:
        with modes.get(mode, torch.enable_grad()), redistribute_policy("auto" if mode == "auto" else "partial"):
            out = function(*args, **options)
        if out.requires_grad:
            out.float().pow(2).sum().backward()
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return type(error)
    leaves = [a for a in args if isinstance(a, torch.Tensor)]
    leaves += list(function.parameters()) if isinstance(function, nn.Module) else []
    return [described(out), *(described(leaf.grad) for leaf in leaves if leaf.is_leaf and leaf.grad is not None)]


def described(tensor):
    spread = isinstance(tensor, DTensor)
    local = tensor.to_local() if spread else tensor
    where = (tensor.layout, tuple(tensor.shape), tensor.stride(), tensor.spec.varying) if spread else ()
    return (*where, tensor.dtype, tensor.requires_grad, local.stride(), local.detach().clone())


def equal(a, b):
    if isinstance(a, type) or isinstance(b, type):
        return a is b
    return len(a) == len(b) and all(x[:-1] == y[:-1] and torch.equal(x[-1], y[-1]) for x, y in zip(a, b, strict=True))


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("name", PATHS)
def test_a_call_after_another_gives_what_it_gives_alone(name):
    make = PATHS[name][0]
    variants = list(calls(name))
    modes = ["plain", "no_grad", "autocast", "auto", *(["training"] if name in ("styles", "sequence", "plan") else [])]
    alone = {}
    for number, made in enumerate(variants):
        for mode in modes if number in (0, 4) else modes[:1]:
            forget()
            alone[number, mode] = result(make(), made, mode)
    assert not isinstance(alone[0, "plain"], type), alone[0, "plain"]
    forget()
    function = make()
    for _ in range(2):
        for (number, mode), want in alone.items():
            result(function, variants[0], "plain")
            got = result(function, variants[number], mode)
            assert equal(got, want), f"{name}, call {number}, {mode}: {got}, alone {want}"
