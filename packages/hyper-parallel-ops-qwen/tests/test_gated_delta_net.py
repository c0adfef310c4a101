"""What the gated delta net calls, against plain torch on all layouts."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommTrace, PackedShard, Replicate, Shard, distribute_tensor
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.placing import mesh_of


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 20
    max_collectives: ClassVar = {"all_reduce": 2, "reduce_scatter": 2}


class TestSolveTriangular(Quick):
    op = torch.linalg.solve_triangular
    samples = (
        sample(tensor(2, 5, 4, 4), tensor(2, 5, 4, 3), upper=False, unitriangular=True),
        sample(tensor(4, 4, low=1, high=2), tensor(3, 4, 6), upper=True),
        sample(tensor(5, 4, 4, low=1, high=2), tensor(1, 5, 4), upper=False, left=False),
        sample(tensor(2, 4, 4, low=1, high=2), tensor(4, 1), upper=False),
    )


class TestSoftplus(Quick):
    op = F.softplus
    samples = (sample(tensor(5, 6)), sample(tensor(3, 5), beta=2, threshold=1))


class TestTril(Quick):
    op = torch.tril
    inplace = "tril_"
    samples = (sample(tensor(5, 6)), sample(tensor(3, 6, 4), diagonal=-1), sample(tensor(2, 6, 5), 2))


class TestTriu(Quick):
    op = torch.triu
    inplace = "triu_"
    samples = (sample(tensor(5, 6), 1), sample(tensor(3, 6, 4), diagonal=-2))


def causal(x, weight, bias=None):
    """As the model has it: padded on both sides, cut on the right."""
    return F.conv1d(x, weight, bias, padding=weight.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]]


class TestConv1d(Quick):
    op = F.conv1d
    max_collectives: ClassVar = {"all_reduce": 3, "reduce_scatter": 3, "all_to_all": 2}
    samples = (
        sample(tensor(2, 5, 7), tensor(5, 1, 4), tensor(5), padding=3, groups=5).options(name="depthwise"),
        sample(tensor(3, 4, 6), tensor(6, 4, 3), tensor(6), padding="same", dilation=2),
        sample(tensor(4, 9), tensor(3, 4, 2), stride=3).options(name="unbatched"),
        sample(tensor(2, 3, 3), tensor(3, 1, 5), padding=6, groups=3).options(name="padding_wider_than_a_piece"),
    )


class TestCausalConv1d(Quick):
    op = causal
    max_collectives: ClassVar = {"all_reduce": 3, "reduce_scatter": 3, "all_to_all": 2}
    samples = (sample(tensor(2, 3, 9), tensor(3, 1, 4)), sample(tensor(1, 5, 2), tensor(5, 1, 2), tensor(5)))


@pytest.mark.ranks(4)
def test_a_sharded_sequence_sends_its_last_positions_to_the_next_rank():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 16), torch.randn(3, 1, 4)
    plain = [t.clone().requires_grad_() for t in (x, weight)]
    causal(*plain).square().sum().backward()
    mesh = mesh_of((4,))
    sequence = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    kernel = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    with CommTrace() as trace:
        out = F.conv1d(F.pad(sequence, (3, 0)), kernel, groups=3)
        out.square().sum().backward()
    assert trace.phase("forward")["all_to_all"] == trace.phase("backward")["all_to_all"] == 2, "the pad's, and the halo"
    torch.testing.assert_close(sequence.grad.full_tensor(), plain[0].grad)
    torch.testing.assert_close(kernel.grad.full_tensor(), plain[1].grad)


@pytest.mark.ranks(4)
def test_channels_in_packed_form_stay_packed():
    """Queries, keys and values side by side, each sharded on its own, go through one depthwise convolution."""
    mesh = mesh_of((4,))
    packing = PackedShard(1, (4, 4, 8))
    x = distribute_tensor(torch.randn(2, 16, 6), mesh, [packing])
    weight = distribute_tensor(torch.randn(16, 1, 4), mesh, [PackedShard(0, (4, 4, 8))])
    with CommTrace() as trace:
        out = causal(x, weight)
    assert trace.counts == {}
    assert out.placements == (packing,)
    torch.testing.assert_close(out.full_tensor(), causal(x.full_tensor(), weight.full_tensor()))
