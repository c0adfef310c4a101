"""``clip_grad_norm_`` over parameters on different meshes, in different layouts, uneven, empty and plain."""

import pytest
import torch
from torch import nn

from hyper_parallel import CommTrace, Replicate, Shard, init_device_mesh
from hyper_parallel.testing.placing import make
from hyper_parallel_fsdp import clip_grad_norm_

SHAPES = [(5, 3), (3, 6), (6,), (1, 2), (), (4, 4)]


def parameters():
    """Plain ones, and the same ones on meshes of two axes, of their sub-meshes, and plain."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    meshes = [
        (mesh, [Shard(0), Shard(0)]),
        (mesh, [Shard(0), Shard(1)]),
        (mesh["fsdp"], [Shard(0)]),
        (mesh, [Shard(0), Replicate()]),  # empty on some ranks
        (mesh, [Replicate(), Replicate()]),
    ]
    generator = torch.Generator().manual_seed(0)
    plain, placed = [], []
    for i, shape in enumerate(SHAPES):
        value, grad = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        plain.append(nn.Parameter(value))
        plain[-1].grad = grad
        if i < len(meshes):
            where, placements = meshes[i]
            placed.append(nn.Parameter(make(value, where, placements)))
            placed[-1].grad = make(grad, where, placements)
        else:
            placed.append(nn.Parameter(value.clone()))
            placed[-1].grad = grad.clone()
    return plain, placed


@pytest.mark.ranks(4)
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_norm_and_gradients_are_those_of_one_device(norm_type, foreach, max_norm):
    plain, placed = parameters()
    want = nn.utils.clip_grad_norm_(plain, max_norm, norm_type)
    with CommTrace() as trace:
        got = clip_grad_norm_(placed, max_norm, norm_type, foreach=foreach)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, want)
    assert [e.ranks for e in trace.events] == [4]  # the norms over fsdp alone and on its own mesh travel with the rest
    for ours, theirs in zip(placed, plain, strict=True):
        grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        torch.testing.assert_close(grad, theirs.grad)


@pytest.mark.ranks(4)
def test_not_finite_and_missing_gradients():
    _, placed = parameters()
    placed[1].grad = None
    assert torch.isfinite(clip_grad_norm_(placed, 1.0))
    placed[0].grad._local.fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"order 2\.0 of the gradients is nan"):
        clip_grad_norm_(placed, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([], 1.0) == 0
    with pytest.raises(ValueError, match="must be positive"):
        clip_grad_norm_(placed, 1.0, norm_type=0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("foreach", [None, False])
def test_dtypes_of_which_some_ranks_hold_nothing(dtype, foreach):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
    plain, placed = [], []
    for kind, rows in ((dtype, 2), (torch.float32, 4)):
        value = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows)).to(kind)
        plain.append(nn.Parameter(value))
        plain[-1].grad = value.clone()
        placed.append(nn.Parameter(make(value, mesh, [Shard(0)])))
        placed[-1].grad = make(value, mesh, [Shard(0)])
    want = nn.utils.clip_grad_norm_(plain, 1.0)
    torch.testing.assert_close(clip_grad_norm_(placed, 1.0, foreach=foreach), want, check_dtype=False)
    for ours, theirs in zip(placed, plain, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
