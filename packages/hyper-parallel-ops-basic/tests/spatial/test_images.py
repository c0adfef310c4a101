"""Pooling, resizing, matrices and Fourier transforms against plain torch, on all layouts."""

import math

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommTrace, PackedShard, Shard, distribute_tensor
from hyper_parallel.testing import OpConformance, at_most, sample, tensor
from hyper_parallel.testing.placing import mesh_of

IMAGES = tensor(3, 2, 5, 6)


class Few(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 10


class TestMaxPool(Few):
    op = F.max_pool2d
    samples = (sample(IMAGES, 2), sample(IMAGES, (3, 2), 1, 1), sample(IMAGES, 2, return_indices=True))


class TestMaxPool1d(Few):
    op = F.max_pool1d
    samples = (sample(tensor(3, 2, 7), 3, 2), sample(tensor(2, 7), 2, ceil_mode=True))


class TestAvgPool(Few):
    op = F.avg_pool2d
    samples = (
        sample(IMAGES, 2),
        sample(IMAGES, (3, 2), 2, 1, ceil_mode=True, count_include_pad=False),
        sample(tensor(2, 3, 5, 6, dtype=torch.int64, low=-9, high=9), 2, 2, 1, count_include_pad=False),
    )


class TestAdaptiveAvgPool(Few):
    op = F.adaptive_avg_pool2d
    samples = (sample(IMAGES, (2, 3)),)


class TestAdaptiveMaxPool(Few):
    op = F.adaptive_max_pool1d
    samples = (sample(tensor(3, 2, 7), 3),)


class TestInterpolate(Few):
    op = F.interpolate
    samples = (
        sample(IMAGES, scale_factor=2),
        sample(IMAGES, size=(7, 3), mode="bilinear", align_corners=False),
        sample(tensor(3, 2, 5), scale_factor=1.7, mode="linear"),
        sample(IMAGES, size=(3, 8), mode="bicubic"),
    )


def elsewhere(*shape, places):
    """Indices into planes of so many places, each plane's in an order of its own."""
    order = torch.rand(*shape[:2], places, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return order[..., : math.prod(shape[2:])].reshape(shape)


class TestMaxUnpool(Few):
    op = F.max_unpool2d
    samples = (
        sample(tensor(2, 3, 5, 2), elsewhere(2, 3, 5, 2, places=40), 2),
        sample(tensor(3, 1, 3), elsewhere(3, 1, 3, places=14), (3, 1), (2, 3), output_size=(2, 7)),
    )
    max_collectives = at_most(all_gather=1, all_to_all=2)


class TestMaxUnpool1d(Few):
    op = F.max_unpool1d
    samples = (sample(tensor(3, 2, 6), elsewhere(3, 2, 6, places=12), 2),)
    max_collectives = at_most(all_gather=1, all_to_all=2)


def pooled_and_back(x):
    return F.max_unpool2d(*F.max_pool2d(x, 3, 2, return_indices=True), 3, 2)


class TestMaxUnpoolOfRepeatedIndices(Few):
    op = pooled_and_back
    samples = (sample(tensor(2, 2, 7, 9)),)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mesh", "placements", "moves", "forward", "backward"),
    [
        ((4,), [Shard(0)], True, {}, {}),
        ((4,), [Shard(2)], False, {"all_gather": 1}, {}),
        ((2, 2), [Shard(3), Shard(2)], False, {"all_gather": 1}, {}),
        ((4,), [Shard(2)], True, {"all_gather": 1, "all_to_all": 2}, {"all_to_all": 1}),
        ((2, 2), [Shard(3), Shard(2)], True, {"all_gather": 1, "all_to_all": 2}, {"all_to_all": 1}),
    ],
)
def test_only_elements_with_a_place_on_another_rank_travel(mesh, placements, moves, forward, backward):
    torch.manual_seed(0)
    values, places = F.max_pool2d(torch.randn(4, 3, 8, 8), 2, return_indices=True)
    places = 63 - places if moves else places
    x, at = (distribute_tensor(t, mesh_of(mesh), placements) for t in (values, places))
    x.requires_grad_()
    with CommTrace() as trace:
        out = F.max_unpool2d(x, at, 2)
        out.backward(torch.ones_like(out))
    assert (trace.phase("forward"), trace.phase("backward")) == (forward, backward)
    assert list(out.placements) == placements
    torch.testing.assert_close(out.full_tensor(), F.max_unpool2d(values, places, 2))
    assert x.grad.full_tensor().eq(1).all()


@pytest.mark.ranks(4)
def test_an_index_in_no_plane_is_an_error_on_every_rank():
    x = distribute_tensor(torch.randn(2, 8), mesh_of((4,)), [Shard(1)])
    places = distribute_tensor(torch.arange(16).view(2, 8) + 1, mesh_of((4,)), [Shard(1)])
    with pytest.raises(RuntimeError, match="Found an invalid max index: 1 of them"):
        F.max_unpool1d(x, places, 2)


class TestLpPool(Few):
    op = F.lp_pool2d
    samples = (sample(IMAGES, 2, 2),)


class TestLocalResponseNorm(Few):
    op = F.local_response_norm
    samples = (sample(tensor(3, 4, 5), 3),)


class TestGridSample(Few):
    op = F.grid_sample
    samples = (
        sample(tensor(2, 3, 4, 4), tensor(2, 3, 2, 2, low=-1, high=1), align_corners=False),
        sample(tensor(2, 1, 3, 4, 2), tensor(2, 3, 5, 2, 3, low=-1, high=1), align_corners=True),
    )


class TestAffineGrid(Few):
    op = F.affine_grid
    samples = (sample(tensor(5, 2, 3), (5, 1, 2, 3), False),)


@pytest.mark.ranks(4)
def test_ranks_that_receive_no_element_take_part_in_second_derivatives():
    values, places = torch.randn(1, 4), torch.arange(4).view(1, 4)
    x, at = (distribute_tensor(t, mesh_of((4,)), [Shard(1)]) for t in (values, places))
    out = F.max_unpool1d(x.requires_grad_(), at, 2)
    (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second.full_tensor(), 6 * values)


class TestColumns(Few):
    op = F.unfold
    samples = (
        sample(tensor(3, 4, 4, 5), 2),
        sample(tensor(2, 5, 3, 3), 2),
        sample(tensor(3, 3, 4), (2, 1), padding=1, stride=2),
        sample(tensor(1, 1, 3, 3), 3),
        sample(tensor(2, 7, 9), (3, 2), dilation=2, padding=(3, 0), stride=(1, 2)),
    )
    max_collectives = at_most(all_to_all=2)


def columns_of_transposed(x):
    return F.unfold(x.mT, (1, 2), stride=2)


class TestColumnsOfTransposed(Few):
    """Which are contiguous, other than on meta tensors."""

    op = columns_of_transposed
    samples = (sample(tensor(2, 1, 3, 4)),)


class TestJoinedColumns(Few):
    op = F.fold
    samples = (
        sample(tensor(3, 16, 6), (3, 4), 2),
        sample(tensor(2, 20, 4), (3, 3), 2),
        sample(tensor(6, 16), (3, 4), (2, 1), padding=(1, 0)),
        sample(tensor(1, 9, 1), 3, 3),
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("channels", "moved"), [(4, {}), (8, {}), (5, {"all_to_all": 1}), (3, {"all_to_all": 1})])
def test_only_rows_of_channels_that_do_not_divide_evenly_travel(channels, moved):
    """And they travel back: ``fold(unfold(x))`` is ``x`` times how often each position is in a patch."""
    x = distribute_tensor(torch.randn(2, channels, 4, 4), mesh_of((4,)), [Shard(1)]).requires_grad_()
    with CommTrace() as trace:
        columns = F.unfold(x, 2, stride=2)
    assert trace.counts == moved
    with CommTrace() as trace:
        image = F.fold(columns, (4, 4), 2, stride=2)
    assert trace.counts == moved
    assert columns.placements == image.placements == (Shard(1),)
    torch.testing.assert_close(image.full_tensor(), x.full_tensor())
    with CommTrace() as trace:
        (image * image).sum().backward()
    assert trace.counts == dict.fromkeys(moved, 2)
    torch.testing.assert_close(x.grad.full_tensor(), 2 * x.detach().full_tensor())


ROWS, EVERY_ROW = Shard(2), PackedShard(2, (4,) * 4)
BESIDE, APART = {"stride": 2}, {"stride": 2, "dilation": 3, "padding": 1}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mesh", "image", "options", "columns", "moved"),
    [
        ((4,), [Shard(2)], BESIDE, [ROWS], 0),
        ((4,), [Shard(3)], BESIDE, [EVERY_ROW], 0),
        ((4,), [Shard(2)], APART, [ROWS], 1),
        ((4,), [Shard(3)], APART, [EVERY_ROW], 1),
        ((2, 2), [Shard(2), Shard(3)], BESIDE, [ROWS, EVERY_ROW], 0),
        ((2, 2), [Shard(2), Shard(3)], APART, [ROWS, EVERY_ROW], 1),
        ((2, 2), [Shard(0), Shard(3)], APART, [Shard(0), EVERY_ROW], 1),
        ((2, 2), [Shard(1), Shard(2)], APART, [Shard(1), ROWS], 2),
    ],
)
def test_only_positions_under_columns_of_other_ranks_travel(mesh, image, options, columns, moved):
    """Patches that end where the shards do are cut out where they are; three channels on two ranks travel as well."""
    whole = torch.randn(2, 3, 8, 8)
    x = distribute_tensor(whole, mesh_of(mesh), image).requires_grad_()
    with CommTrace() as trace:
        out = F.unfold(x, 2, **options)
        out.backward(torch.ones_like(out))
    calls = {"all_to_all": moved} if moved else {}
    assert trace.phase("forward") == trace.phase("backward") == calls
    assert list(out.placements) == columns
    torch.testing.assert_close(out.full_tensor(), F.unfold(whole, 2, **options))


class TestWindows(Few):
    op = torch.Tensor.unfold
    samples = (sample(tensor(9, 2), 0, 3, 2), sample(tensor(2, 6), 1, 2, 1), sample(tensor(5), 0, 4, 1))


class TestInv(Few):
    op = torch.linalg.inv
    samples = (sample(tensor(5, 3, 3)),)


class TestSolve(Few):
    op = torch.linalg.solve
    samples = (sample(tensor(5, 3, 3), tensor(5, 3, 2)), sample(tensor(5, 3, 3), tensor(5, 3)))


class TestMatrixNorm(Few):
    op = torch.linalg.matrix_norm
    samples = (sample(tensor(3, 2, 5), "nuc", (0, 2)), sample(tensor(4, 3), -2))


class TestSlogdet(Few):
    op = torch.linalg.slogdet
    samples = (sample(tensor(5, 3, 3)),)


class TestCond(Few):
    op = torch.linalg.cond
    samples = (sample(tensor(5, 3, 3)), sample(tensor(3, 3)), sample(tensor(2, 2, 4, 4), -2))


class TestFft(Few):
    op = torch.fft.fft
    samples = (sample(tensor(5, 6)), sample(tensor(5, 6), dim=0), sample(tensor(5, 2), n=8, dim=0))


class TestIrfft(Few):
    op = torch.fft.irfft
    samples = (sample(tensor(5, 4, dtype=torch.complex128)),)


class TestFftn(Few):
    op = torch.fft.fftn
    samples = (sample(tensor(2, 5, 3), dim=(2, 0)), sample(tensor(4, 5)))


class TestUnique(Few):
    op = torch.unique
    samples = (
        sample(tensor(5, 6, dtype=torch.int64)),
        sample(tensor(7, dtype=torch.int64), return_inverse=True, return_counts=True),
        sample(tensor(6, 2, dtype=torch.int64, high=2), return_inverse=True, return_counts=True, dim=0),
    )


class TestUniqueConsecutive(Few):
    op = torch.unique_consecutive
    samples = (
        sample(torch.tensor([1, 1, 2, 2, 2, 1, 3]), return_inverse=True, return_counts=True),
        sample(torch.tensor([[1, 1], [1, 1], [2, 1], [2, 1], [1, 1]]), dim=0),
    )


class TestIsIn(Few):
    op = torch.isin
    samples = (
        sample(tensor(5, 6, dtype=torch.int64), torch.tensor([1, 3, 4])),
        sample(tensor(5, dtype=torch.int64), tensor(3, dtype=torch.int64), invert=True),
    )


class TestSearchSorted(Few):
    op = torch.searchsorted
    samples = (
        sample(torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0]), tensor(5, 6, dtype=torch.float32, grad=False)),
        sample(torch.tensor([[0.0, 1.0], [0.5, 2.0]]), tensor(2, 3, dtype=torch.float32, grad=False), right=True),
    )


class TestBucketize(Few):
    op = torch.bucketize
    samples = (sample(tensor(5, 6, dtype=torch.float32, grad=False), torch.tensor([-1.0, 0.0, 0.5])),)


class TestQuantile(Few):
    op = torch.quantile
    samples = (
        sample(tensor(5, 6), 0.3, 0),
        sample(tensor(5, 6), torch.tensor([0.1, 0.5], dtype=torch.float64), 1, True),
        sample(tensor(5, 3), 0.5),
    )


def as_complex(x):
    return torch.view_as_real(torch.view_as_complex(x) * 2j)


class TestComplexViews(Few):
    op = as_complex
    samples = (sample(tensor(5, 3, 2)),)


class TestPolar(Few):
    op = torch.polar
    samples = (sample(tensor(5, 6), tensor(6)),)
