"""PyTorch's styles and ours on the same modules, each in a process group of its own: the same numbers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as theirs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from tp_models import Attention, Block, Mlp, twins, whole

import hyper_parallel as ours
from hyper_parallel import Replicate, Shard

R, S0, S1, LAST = Replicate(), Shard(0), Shard(1), Shard(-1)


def hidden(length=4, width=8):
    return torch.randn(2, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def mlp(lib):
    return {"gate": lib.ColwiseParallel(), "up": lib.ColwiseParallel(), "down": lib.RowwiseParallel()}


def attention(lib):
    return {"[qkv]": lib.ColwiseParallel(), "o": lib.RowwiseParallel()}


def block_in_sequence(lib):
    """TorchTitan's plan of a decoder layer with sequence parallel."""
    gathered = lib.PrepareModuleInput(input_layouts=(S1,), desired_input_layouts=(R,))
    return {
        "norm1": lib.SequenceParallel(),
        "norm2": lib.SequenceParallel(),
        "attention": gathered,
        "mlp": gathered,
        "attention.q": lib.ColwiseParallel(use_local_output=False),
        "attention.k": lib.ColwiseParallel(use_local_output=False),
        "attention.v": lib.ColwiseParallel(use_local_output=False),
        "attention.o": lib.RowwiseParallel(output_layouts=S1, use_local_output=False),
        "mlp.gate": lib.ColwiseParallel(),
        "mlp.up": lib.ColwiseParallel(),
        "mlp.down": lib.RowwiseParallel(output_layouts=S1, use_local_output=False),
    }


# name -> module, plan, how the output lies on the ranks
CASES = {
    "colwise": (lambda: nn.Linear(8, 6), lambda lib: lib.ColwiseParallel(), LAST),
    "colwise, uneven": (lambda: nn.Linear(8, 5), lambda lib: lib.ColwiseParallel(), LAST),
    "colwise, gathered": (lambda: nn.Linear(8, 6), lambda lib: lib.ColwiseParallel(output_layouts=R), R),
    "colwise, DTensor out": (
        lambda: nn.Linear(8, 6),
        lambda lib: lib.ColwiseParallel(use_local_output=False),
        LAST,
    ),
    "rowwise, split input": (lambda: nn.Linear(8, 6), lambda lib: lib.RowwiseParallel(input_layouts=R), R),
    "rowwise, scattered": (
        lambda: nn.Linear(8, 6),
        lambda lib: lib.RowwiseParallel(input_layouts=R, output_layouts=S1),
        S1,
    ),
    "mlp": (Mlp, mlp, R),
    "mlp with bias": (lambda: Mlp(bias=True), mlp, R),
    "sequence": (lambda: nn.LayerNorm(8), lambda lib: lib.SequenceParallel(use_local_output=True), S1),
    "attention": (lambda: Attention(kv_heads=2), attention, R),
    "block": (
        lambda: Block(bias=True),
        lambda lib: {
            f"{part}.{k}": s
            for part, plan in (("attention", attention(lib)), ("mlp", mlp(lib)))
            for k, s in plan.items()
        },
        R,
    ),
}


def run(lib, name, mesh):
    make, plan, placement = CASES[name]
    model, twin = twins(make)
    lib.parallelize_module(model, mesh, plan(lib))
    x, y = hidden().requires_grad_(), hidden().requires_grad_()
    sequence = name == "sequence"
    given = x.chunk(mesh.size(), 1)[mesh.get_local_rank()] if sequence else x
    out, want = model(given), twin(y)
    if not hasattr(out, "placements"):
        kind = TorchDTensor if lib is theirs else ours.DTensor
        out = kind.from_local(out, mesh, [placement], shape=want.shape, stride=want.stride())
    assert out.placements in ((placement,), (Shard(placement.dim % 3),) if isinstance(placement, Shard) else ())
    torch.testing.assert_close(whole(out), want)
    loss = whole(out).pow(2).sum() if lib is theirs else out.pow(2).sum()
    loss.backward()
    want.pow(2).sum().backward()
    return x, y, model, twin, sequence


@cache
def mesh_of(lib):
    """Kept: torch remembers the groups of meshes that it has seen."""
    return DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("tp",))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name):
    for lib in (theirs, ours):
        mesh = mesh_of(lib)
        x, y, model, twin, sequence = run(lib, name, mesh)
        grad = x.grad
        if sequence:
            dist.all_reduce(grad, group=mesh.get_group())  # each rank used its part
        torch.testing.assert_close(grad, y.grad)
        for parameter, single in zip(model.parameters(), twin.parameters(), strict=True):
            if not hasattr(parameter, "placements"):  # plain norms: every rank computes the same
                torch.testing.assert_close(parameter.grad, single.grad)
            else:
                torch.testing.assert_close(whole(parameter.grad), single.grad)
                assert lib is theirs or parameter.grad.placements == parameter.placements
