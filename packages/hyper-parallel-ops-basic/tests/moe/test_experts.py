"""What mixtures of experts call: grouped products and counting, against plain torch on all layouts."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommTrace, PackedShard, Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.placing import mesh_of
from hyper_parallel_ops_basic.moe.grouped_mm import plain_grouped_mm

OFFS = torch.tensor([2, 2, 5, 7, 8], dtype=torch.int32)
FEW = torch.tensor([3, 8], dtype=torch.int32)


def f32(*shape):
    return tensor(*shape, dtype=torch.float32)


def grouped_mm(a, b, offs=None):
    """The weights as a model has them, transposed: the kernel's own backward wants its gradients like that."""
    return torch._grouped_mm(a, b.transpose(-2, -1), offs=offs)


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 20
    max_collectives: ClassVar = {"all_reduce": 3, "reduce_scatter": 2}


class TestGroupedMM(Quick):
    op = grouped_mm
    samples = (
        sample(f32(8, 16), f32(5, 16, 16), OFFS).options(name="rows"),
        sample(f32(8, 12), f32(2, 4, 12), FEW).options(name="few_groups"),
        sample(f32(3, 4, 8), f32(3, 4, 8)).options(name="stacks"),
    )


class TestGroupedMMOfColumns(Quick):
    op = torch._grouped_mm
    reference = plain_grouped_mm
    samples = (
        sample(tensor(5, 4, 8, dtype=torch.float32, grad=False), tensor(8, 8, dtype=torch.float32, grad=False), OFFS),
        sample(tensor(8, 8, dtype=torch.float32, grad=False), tensor(8, 4, dtype=torch.float32, grad=False), OFFS),
    )


class TestHistc(Quick):
    op = torch.histc
    samples = (
        sample(tensor(7, low=0, high=6), bins=6, min=0, max=5),
        sample(tensor(3, 5), 4),
        sample(tensor(2), 3).options(name="fewer_elements_than_ranks"),
        sample(tensor(0), 3).options(name="empty"),
    )


class TestHistogram(Quick):
    op = torch.histogram
    samples = (
        sample(tensor(7, grad=False), 4),
        sample(tensor(3, 5, grad=False), 3, range=(-1.0, 1.0), weight=tensor(3, 5, grad=False), density=True),
    )


def by_edges(x, edges):
    return torch.histogram(x.detach(), edges.detach())


class TestHistogramByEdges(Quick):
    op = by_edges
    samples = (sample(tensor(5, 2), torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)),)


class TestBincount(Quick):
    op = torch.bincount
    samples = (
        sample(tensor(7, dtype=torch.int64)),
        sample(tensor(5, dtype=torch.int64), minlength=9),
        sample(tensor(6, dtype=torch.int64), tensor(6, grad=False)),
        sample(tensor(0, dtype=torch.int64)),
        sample(tensor(9, dtype=torch.uint8)),
    )


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((4,)), placements)


def counted(call):
    with CommTrace() as trace:
        out = call()
    return out, trace.counts


@pytest.mark.ranks(4)
@pytest.mark.parametrize("func", ["_grouped_mm", "F.grouped_mm", "fallback"])
def test_every_form_of_grouped_mm_has_one_rule(func):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    x, weights = torch.randn(8, 16), torch.randn(5, 16, 8)
    forms = {"_grouped_mm": torch._grouped_mm, "F.grouped_mm": F.grouped_mm}
    form = forms.get(func) or torch.ops.transformers.grouped_mm_fallback
    want = plain_grouped_mm(x, weights, OFFS)
    given = {
        "rows": (Shard(0), Replicate(), Shard(0)),
        "experts": (Replicate(), Shard(0), Partial()),
        "features": (Replicate(), Shard(2), Shard(1)),
        "contracted": (Shard(1), Shard(1), Partial()),
        "fused features": (Replicate(), PackedShard(2, (4, 4)), PackedShard(1, (4, 4))),
    }
    for name, (of_x, of_weights, of_out) in given.items():
        args = spread(x, of_x), spread(weights, of_weights)
        offs = spread(OFFS, Replicate())
        out, collectives = counted(lambda args=args, offs=offs: form(*args, offs=offs))
        assert collectives == {}, name
        assert out.placements == (of_out,), name
        torch.testing.assert_close(out.full_tensor(), want, msg=name)


@pytest.mark.ranks(4)
def test_experts_and_rows_on_two_axes():
    torch.manual_seed(0)
    mesh = mesh_of((2, 2))
    x, weights = torch.randn(8, 16), torch.randn(5, 8, 16)
    plain = [t.clone().requires_grad_() for t in (x, weights)]
    upstream = torch.randn(8, 8)
    grouped_mm(*plain, OFFS).backward(upstream)
    mine = [
        distribute_tensor(x, mesh, [Shard(0), Replicate()]).requires_grad_(),
        distribute_tensor(weights, mesh, [Replicate(), Shard(0)]).requires_grad_(),
    ]
    out = grouped_mm(*mine, distribute_tensor(OFFS, mesh, [Replicate(), Replicate()]))
    assert out.placements == (Shard(0), Partial())
    out.backward(distribute_tensor(upstream, mesh, [Shard(0), Replicate()]))
    for a, b in zip(mine, plain, strict=True):
        assert a.grad.placements == a.placements
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


@pytest.mark.ranks(4)
def test_groups_without_rows_and_ranks_without_groups():
    offs = torch.tensor([0, 8, 8, 8], dtype=torch.int32)
    x, weights = torch.randn(8, 16), torch.randn(4, 16, 8)
    few = weights[:2]
    for stack, ends in ((weights, offs), (few, offs[:2])):
        w = spread(stack, Shard(0)).requires_grad_()
        out = torch._grouped_mm(spread(x, Replicate()).requires_grad_(), w, offs=spread(ends, Replicate()))
        torch.testing.assert_close(out.full_tensor(), x @ weights[1])
        out.redistribute(placements=[Replicate()]).backward(torch.ones(8, 8))
        torch.testing.assert_close(w.grad.full_tensor()[1], x.T @ torch.ones(8, 8))


@pytest.mark.ranks(4)
def test_histogram_costs_nothing_with_a_range_and_two_numbers_without():
    x = spread(torch.arange(7.0), Shard(0))
    out, collectives = counted(lambda: torch.histc(x, bins=7, min=0, max=6))
    assert collectives == {}
    assert out.placements == (Partial(),)
    assert torch.equal(out.full_tensor(), torch.ones(7))
    same = torch.histc(spread(torch.full((5,), 2.0), Shard(0)), bins=3)
    assert same.full_tensor().tolist() == [0, 5, 0]
    out, collectives = counted(lambda: torch.histc(x, bins=7))
    assert collectives == {"all_reduce": 2}
    assert torch.equal(out.full_tensor(), torch.ones(7))


@pytest.mark.ranks(4)
def test_bincount_needs_one_number():
    ids = spread(torch.tensor([4, 0, 2, 0, 1]), Shard(0))
    out, collectives = counted(lambda: torch.bincount(ids))
    assert collectives == {"all_reduce": 1}
    assert out.placements == (Partial(),)
    assert out.full_tensor().tolist() == [2, 1, 1, 0, 1]
