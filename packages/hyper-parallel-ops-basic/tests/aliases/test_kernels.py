"""Kernels by the names under which PyTorch's layers call them, and operators of torch.ops.aten."""

import pytest
import torch

from hyper_parallel import DTensor, Shard
from hyper_parallel.testing import OpConformance, make, mesh_of, sample, tensor

aten = torch.ops.aten
MATRIX, IMAGES = tensor(5, 6), tensor(3, 4, 5, 2)


class Few(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 6


def softmaxes(x):
    return torch._softmax(x, 1, False), torch._log_softmax(x, -1, False), aten._softmax.default(x, 0, False)


class TestSoftmax(Few):
    op = softmaxes
    samples = (sample(MATRIX),)


class TestLayerNorm(Few):
    op = torch.native_layer_norm
    samples = (sample(MATRIX, (6,), tensor(6), tensor(6), 1e-5),)


def group_normed(x, weight, bias):
    out, mean, scale = torch.native_group_norm(x, weight, bias, 3, 4, 10, 2, 1e-5)
    shift = weight.sum() + bias.sum()  # PyTorch counts the statistics as made of these too
    return out, mean + shift, scale + shift


class TestGroupNorm(Few):
    op = group_normed
    samples = (sample(IMAGES, tensor(4), tensor(4)),)


def group_normed_with_channels_last(x, weight, bias):
    return group_normed(x.contiguous(memory_format=torch.channels_last), weight, bias)


class TestGroupNormWithChannelsLast(Few):
    op = group_normed_with_channels_last
    samples = (sample(IMAGES, tensor(4), tensor(4)),)


class TestBatchNorm(Few):
    op = torch.native_batch_norm
    samples = (sample(IMAGES, tensor(4), tensor(4), None, None, True, 0.1, 1e-5),)


def other_orders(x, weight, bias, ids, table):
    normed = torch.batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5, False)
    each = torch.instance_norm(x, weight, bias, None, None, True, 0.1, 1e-5, False)
    return normed, each, torch.embedding(table, ids), aten.embedding.default(table, ids, 1)


class TestArgumentsInAnotherOrder(Few):
    op = other_orders
    samples = (sample(IMAGES, tensor(4), tensor(4), tensor(3, 2, dtype=torch.int64), tensor(5, 2)),)


def losses(x, y, chances, ids, weight):
    native = torch._C._nn
    return (
        torch.kl_div(x, chances.detach(), 2, log_target=False),
        torch.binary_cross_entropy_with_logits(x, chances.detach(), None, weight.detach()),
        torch.cosine_embedding_loss(x, y, x[:, 0].detach().sign(), 0.1, 1),
        torch.hinge_embedding_loss(x, y.detach().sign()),
        torch.margin_ranking_loss(x, y, y.detach().sign(), 0.2, 2),
        torch.poisson_nll_loss(x, chances, True, False, 1e-8, 1),
        torch.triplet_margin_loss(x, y, chances, 1.0, 2, 1e-6, False, 1),
        native.mse_loss(x, y, 1),
        native.l1_loss(x, y),
        native.smooth_l1_loss(x, y, 2, 0.5),
        native.huber_loss(x, y, 0, 0.5),
        native.soft_margin_loss(x, y.detach().sign()),
        native.multi_margin_loss(x, ids),
        native.cross_entropy_loss(x, ids, weight.detach(), 1, 2, 0.1),
        native.nll_loss_nd(x.log_softmax(1), ids),
        native.binary_cross_entropy(chances, chances.detach()),
        native.glu(x, 1),
        aten.mse_loss.default(x, y, 2),
        aten.mse_loss.default(x, y),
        aten.l1_loss(x, y),
    )


class TestLosses(Few):
    op = losses
    samples = (
        sample(MATRIX, MATRIX, tensor(5, 6, low=0.1, high=0.9), tensor(5, dtype=torch.int64), tensor(6, low=0.5)),
    )


def turned(theta):
    return torch.affine_grid_generator(theta, [3, 2, 4, 5], False)


class TestAffineGridGenerator(Few):
    op = turned
    samples = (sample(tensor(3, 2, 3)),)


def copies(x):
    return (
        torch.view_copy(x, [5, 2, 3]),
        torch.permute_copy(x, [1, 0]),
        torch.transpose_copy(x, 0, 1),
        torch.t_copy(x),
        torch.select_copy(x, 0, 1),
        torch.unsqueeze_copy(x, 1),
        torch.squeeze_copy(x),
        torch.expand_copy(x, [2, 5, 6]),
        torch.diagonal_copy(x),
        torch.unfold_copy(x, 1, 2, 2),
        torch.unbind_copy(x, 1)[2],
        torch.split_copy(x, 2, 1)[1],
        torch.split_with_sizes_copy(x, [1, 5], 1)[1],
        torch.detach_copy(x.detach()),
        aten.view_copy.default(x, [5, 6]),
    )


class TestCopiesOfViews(Few):
    op = copies
    samples = (sample(MATRIX),)


@pytest.mark.ranks(4)
def test_copies_of_views_are_written_to_out():
    value = torch.arange(24.0).reshape(4, 6)
    x = make(value, mesh_of((4,)), [Shard(1)])
    out = [torch.zeros_like(x[:2]) for _ in range(2)]
    torch.split_copy(x, 2, out=out)
    for piece, want in zip(out, value.split(2), strict=True):
        torch.testing.assert_close(piece.full_tensor(), want)
    row = torch.zeros_like(x[0])
    assert torch.select_copy(x, 0, 3, out=row) is row
    torch.testing.assert_close(row.full_tensor(), value[3])


class TestConvolution(Few):
    op = torch.convolution
    samples = (
        sample(IMAGES, tensor(6, 4, 2, 1), tensor(6), [1, 1], [1, 0], [1, 1], False, [0, 0], 1),
        sample(IMAGES, tensor(4, 3, 2, 2), None, [2, 1], [0, 0], [1, 1], True, [0, 0], 1),
    )


def by_aten(x, y, ids):
    return (
        aten.add.Tensor(x, y, alpha=2),
        aten.mul.Scalar(x, 3),
        aten.sum.dim_IntList(x, [0], True),
        aten.mean.dim(x, [1]),
        aten.mm.default(x, aten.t.default(y)),
        aten.view.default(x, [5, 2, 3]),
        aten.slice.Tensor(x, 1, 1, 5, 2),
        aten.select.int(x, 0, 2),
        aten.index.Tensor(x, [None, ids]),
        aten.silu.default(x),
        aten.gelu.default(x, approximate="tanh"),
        aten.leaky_relu.default(x, 0.2),
        aten.linalg_vector_norm.default(x, 2, [1]),
        aten.special_entr.default(aten.abs.default(x)),
        aten.split.Tensor(x, 2)[1],
        aten.alias.default(x),
        aten._to_copy.default(x, dtype=torch.float32),
        aten.cat.default([x, y], 1),
    )


class TestOperatorsOfAten(Few):
    op = by_aten
    samples = (sample(MATRIX, MATRIX, torch.tensor([3, 0])),)


@pytest.mark.ranks(4)
def test_aten_forms_that_write_do_so_in_place():
    x = make(torch.ones(5, 3), mesh_of((4,)), [Shard(0)])
    for write in (aten.add_.Tensor, aten.mul_.Scalar, aten.silu_.default):
        assert write(x, *([2] if write is not aten.silu_.default else [])) is x
    want = torch.nn.functional.silu(torch.full((5, 3), 6.0))
    torch.testing.assert_close(x.full_tensor(), want)
    out = torch.empty_like(x)
    assert aten.add.out(x, x, out=out) is out
    torch.testing.assert_close(out.full_tensor(), 2 * want)


@pytest.mark.ranks(4)
def test_functions_of_the_tensor_itself_by_any_name():
    x = make(torch.ones(5, 3), mesh_of((4,)), [Shard(0)], requires_grad=True)
    for detached in (torch.detach(x), torch.Tensor.detach(x), aten.detach.default(x)):
        assert isinstance(detached, DTensor)
        assert not detached.requires_grad
    assert aten._local_scalar_dense.default(aten.sum.default(x)) == 15
    torch._assert_async((x > 0).all())
    with pytest.raises(RuntimeError, match="all positive"):
        torch._assert_async((x < 0).all(), "all positive")
