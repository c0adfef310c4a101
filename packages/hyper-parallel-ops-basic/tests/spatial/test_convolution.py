"""Convolutions over images and volumes, against plain torch on all layouts."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommTrace, PackedShard, Replicate, Shard, distribute_tensor
from hyper_parallel.testing import OpConformance, at_most, sample, tensor
from hyper_parallel.testing.placing import mesh_of


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 16


class TestConv2d(Quick):
    op = F.conv2d
    max_collectives = at_most(all_to_all=2)
    samples = (
        sample(tensor(3, 4, 7, 6), tensor(5, 4, 3, 2), tensor(5), padding=1),
        sample(tensor(2, 8, 5, 9), tensor(8, 2, 3, 3), groups=4, stride=(1, 2), dilation=(2, 1), padding=(2, 0)),
        sample(tensor(3, 6, 5), tensor(3, 1, 2, 2), tensor(3), padding="same", groups=3).options(name="unbatched"),
    )


class TestConv3d(Quick):
    op = F.conv3d
    max_collectives = at_most(all_to_all=2)
    samples = (sample(tensor(3, 2, 4, 5, 4), tensor(3, 2, 2, 2, 2), tensor(3), stride=2),)


class TestConvTranspose(Quick):
    op = F.conv_transpose1d
    max_collectives = at_most(all_to_all=1)
    samples = (
        sample(tensor(3, 4, 7), tensor(4, 5, 3), tensor(5), stride=2, padding=1, output_padding=1),
        sample(tensor(2, 4, 5), tensor(4, 2, 2), stride=3, dilation=2, groups=4),
    )


@pytest.mark.ranks(4)
def test_rows_and_columns_of_an_image_on_two_axes():
    torch.manual_seed(0)
    mesh = mesh_of((2, 2))
    x, weight = torch.randn(1, 2, 7, 5), torch.randn(3, 2, 3, 3)
    plain = [t.clone().requires_grad_() for t in (x, weight)]
    want = F.conv2d(*plain, padding=1)
    want.square().sum().backward()
    image = distribute_tensor(x, mesh, [Shard(2), Shard(3)]).requires_grad_()
    kernel = distribute_tensor(weight, mesh, [Replicate(), Replicate()]).requires_grad_()
    with CommTrace() as trace:
        out = F.conv2d(image, kernel, padding=1)
    assert trace.counts == {"all_to_all": 2}, "one per sharded dim"
    assert out.placements == (Shard(2), Shard(3))
    torch.testing.assert_close(out.full_tensor(), want)
    out.square().sum().backward()
    torch.testing.assert_close(image.grad.full_tensor(), plain[0].grad)
    torch.testing.assert_close(kernel.grad.full_tensor(), plain[1].grad)


@pytest.mark.ranks(4)
def test_packed_positions_come_out_plain():
    """Two images beside each other, each sharded on its own: windows cross from one into the other."""
    torch.manual_seed(0)
    mesh, x, weight = mesh_of((4,)), torch.randn(2, 3, 9, 4), torch.randn(5, 3, 3, 3)
    plain = [t.clone().requires_grad_() for t in (x, weight)]
    want = F.conv2d(*plain, padding=1)
    want.square().sum().backward()
    image = distribute_tensor(x, mesh, [PackedShard(2, (5, 4))]).requires_grad_()
    kernel = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    with CommTrace() as trace:
        out = F.conv2d(image, kernel, padding=1)
    assert trace.counts == {"all_to_all": 1}
    assert out.placements == (Shard(2),)
    torch.testing.assert_close(out.full_tensor(), want)
    out.square().sum().backward()
    assert image.grad.placements == (PackedShard(2, (5, 4)),)
    torch.testing.assert_close(image.grad.full_tensor(), plain[0].grad)
    torch.testing.assert_close(kernel.grad.full_tensor(), plain[1].grad)


@pytest.mark.ranks(4)
def test_patches_of_their_own_need_no_halo():
    """A vision model's patch embedding: the kernel moves by its own size."""
    mesh = mesh_of((4,))
    x, weight = distribute_tensor(torch.randn(1, 3, 16, 4), mesh, [Shard(2)]), torch.randn(8, 3, 4, 4)
    with CommTrace() as trace:
        out = F.conv2d(x, distribute_tensor(weight, mesh, [Replicate()], src_data_rank=None), stride=4)
    assert "all_to_all" not in trace.counts
    assert out.placements == (Shard(2),)
