"""Functions that are others in sequence against plain torch, on all layouts."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommTrace, Replicate, Shard
from hyper_parallel.testing import OpConformance, make, mesh_of, sample, tensor

MATRIX, VECTOR = tensor(5, 6), tensor(5)
IMAGES = tensor(3, 8, 4, 2)


class Few(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 10


class TestDiff(Few):
    op = torch.diff
    samples = (
        sample(MATRIX, dim=0),
        sample(MATRIX, 2, 1),
        sample(MATRIX, 0, 1, tensor(5, 2)),
        sample(VECTOR, prepend=tensor(2)),
    )


class TestTrapezoid(Few):
    op = torch.trapezoid
    samples = (sample(MATRIX, dim=0), sample(MATRIX, tensor(6)), sample(MATRIX, dx=0.5))


class TestCumulativeTrapezoid(Few):
    op = torch.cumulative_trapezoid
    samples = (sample(MATRIX),)


class TestNanmean(Few):
    op = torch.nanmean
    samples = (sample(torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, 5.0, 6.0]]), 1),)


class TestDiagonal(Few):
    op = torch.diagonal
    samples = (
        sample(MATRIX),
        sample(MATRIX, -2),
        sample(tensor(2, 5, 3), 1, 2, 0),
        sample(tensor(4, 4, dtype=torch.bool)),
    )


class TestTrace(Few):
    op = torch.trace
    samples = (sample(MATRIX),)


class TestDiag(Few):
    op = torch.diag
    samples = (sample(MATRIX, 1), sample(VECTOR), sample(VECTOR, -1))


class TestDiagEmbed(Few):
    op = torch.diag_embed
    samples = (sample(MATRIX), sample(MATRIX, 1, 0, 2), sample(tensor(5, dtype=torch.bool), -1))


class TestDiagonalScatter(Few):
    op = torch.diagonal_scatter
    samples = (sample(MATRIX, VECTOR), sample(MATRIX, tensor(4), -1))


class TestFillDiagonal(Few):
    op = torch.clone
    inplace = "fill_diagonal_"
    samples = (sample(tensor(5, 5), 2.0).options(name="square"),)

    test_layouts = None


class TestSelectScatter(Few):
    op = torch.select_scatter
    samples = (sample(MATRIX, tensor(6), 0, 3),)


class TestSliceScatter(Few):
    op = torch.slice_scatter
    samples = (sample(MATRIX, tensor(2, 6), 0, 1, 5, 2),)


class TestTake(Few):
    op = torch.take
    samples = (sample(MATRIX, torch.tensor([[0, 7], [-1, 29]])),)


class TestPut(Few):
    op = torch.Tensor.put
    inplace = "put_"
    samples = (
        sample(MATRIX, torch.tensor([0, 7, -1]), tensor(3)),
        sample(MATRIX, torch.tensor([4, 4, 9]), tensor(3), accumulate=True),
        sample(tensor(), torch.tensor([0]), tensor(1), accumulate=True),
    )


class TestTakeAlongDim(Few):
    op = torch.take_along_dim
    out = True
    samples = (
        sample(MATRIX, tensor(5, 2, dtype=torch.int64), 1),
        sample(MATRIX, tensor(1, 6, dtype=torch.int64, high=5), dim=0),
        sample(MATRIX, tensor(4, dtype=torch.int64)),
    )


class TestOuter(Few):
    op = torch.outer
    samples = (sample(VECTOR, tensor(3)),)


class TestAddr(Few):
    op = torch.addr
    inplace = "addr_"
    samples = (
        sample(MATRIX, VECTOR, tensor(6), beta=2, alpha=0.5),
        sample(tensor(5, 3, dtype=torch.bool), tensor(5, dtype=torch.bool), tensor(3, dtype=torch.bool)),
    )


class TestInner(Few):
    op = torch.inner
    samples = (sample(MATRIX, tensor(3, 6)), sample(VECTOR, VECTOR))


class TestVecdot(Few):
    op = torch.linalg.vecdot
    samples = (sample(MATRIX, MATRIX), sample(MATRIX, tensor(6), dim=-1))


class TestTensordot(Few):
    op = torch.tensordot
    samples = (
        sample(tensor(2, 5, 3), tensor(5, 3, 4)),
        sample(tensor(2, 5, 3), tensor(3, 2), dims=([2, 0], [0, 1])),
        sample(tensor(5, 3), tensor(2, 4), 0),
    )


class TestKron(Few):
    op = torch.kron
    samples = (sample(tensor(2, 3), tensor(4, 2)),)


class TestCross(Few):
    op = torch.linalg.cross
    samples = (
        sample(tensor(5, 3), tensor(5, 3)),
        sample(tensor(3, 4), tensor(3, 4), dim=0),
        sample(tensor(3, 3), tensor(3, 3)),
    )


class TestCrossOfFirst(Few):
    op = torch.cross
    samples = (sample(tensor(3, 3), tensor(3, 3)), sample(tensor(2, 3), tensor(2, 3)))


class TestBilinear(Few):
    op = F.bilinear
    samples = (sample(tensor(5, 3), tensor(5, 4), tensor(2, 3, 4), tensor(2)),)


class TestDstack(Few):
    op = torch.dstack
    samples = (sample([MATRIX, MATRIX]), sample([VECTOR, VECTOR]))


class TestColumnStack(Few):
    op = torch.column_stack
    samples = (sample([VECTOR, MATRIX]),)


class TestMeshgrid(Few):
    op = torch.meshgrid
    samples = (
        sample(VECTOR, tensor(3), indexing="ij"),
        sample(VECTOR, tensor(3), indexing="xy"),
        sample([VECTOR, tensor(3)], indexing="ij"),
    )


class TestCartesianProd(Few):
    op = torch.cartesian_prod
    samples = (sample(tensor(4), tensor(2)),)


class TestBlockDiag(Few):
    op = torch.block_diag
    samples = (sample(tensor(2, 3), tensor(3, 2)),)


class TestRot90(Few):
    op = torch.rot90
    samples = (sample(MATRIX), sample(MATRIX, 2), sample(MATRIX, 3, (1, 0)), sample(MATRIX, 4))


class TestPixelShuffle(Few):
    op = F.pixel_shuffle
    samples = (sample(IMAGES, 2),)


class TestPixelUnshuffle(Few):
    op = F.pixel_unshuffle
    samples = (sample(IMAGES, 2),)


class TestChannelShuffle(Few):
    op = torch.channel_shuffle
    samples = (sample(tensor(3, 8, 2, grad=False), 2),)


def images_with_channels_last(x):
    x = x.contiguous(memory_format=torch.channels_last)
    return F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), torch.channel_shuffle(x.detach(), 2)


class TestImagesWithChannelsLast(Few):
    op = images_with_channels_last
    samples = (sample(IMAGES),)


def written_copies(x, matrix):
    """Where there is nothing to do: the inputs themselves stay as they are."""
    shuffled = (F.pixel_shuffle(x, 1), F.pixel_unshuffle(x, 1), torch.channel_shuffle(x.detach(), 1))
    return [copy.mul_(2) for copy in (*shuffled, torch.chain_matmul(matrix), matrix.rot90(0))]


class TestWrittenCopies(Few):
    op = written_copies
    samples = (sample(tensor(2, 3, 4, 5), MATRIX),)


class TestGlu(Few):
    op = F.glu
    samples = (sample(MATRIX), sample(tensor(6, 3), 0))


class TestPrelu(Few):
    op = F.prelu
    samples = (sample(MATRIX, tensor(6)), sample(IMAGES, tensor(1)), sample(IMAGES, tensor(8)))


class TestPairwiseDistance(Few):
    op = F.pairwise_distance
    samples = (sample(MATRIX, MATRIX), sample(MATRIX, tensor(6), 1.0, keepdim=True))


class TestCosineSimilarity(Few):
    op = F.cosine_similarity
    samples = (sample(MATRIX, MATRIX), sample(MATRIX, MATRIX, dim=0), sample(MATRIX, tensor(1, 6), dim=0))


class TestNormalize(Few):
    op = F.normalize
    samples = (sample(MATRIX), sample(MATRIX, p=1, dim=0))


class TestCDist(Few):
    op = torch.cdist
    samples = (
        sample(MATRIX, tensor(3, 6)),
        sample(tensor(2, 5, 3), tensor(2, 2, 3), 1.0),
        sample(MATRIX, tensor(3, 6), 0.0),
    )


class TestBatchNorm(Few):
    op = F.batch_norm
    samples = (
        sample(MATRIX, None, None, tensor(6), tensor(6), True),
        sample(IMAGES, None, None, training=True),
        sample(MATRIX, tensor(6, grad=False), tensor(6, low=0.5, high=2.0, grad=False), tensor(6)),
    )


@pytest.mark.ranks(4)
def test_batch_norm_of_one_dim_is_refused_as_in_pytorch():
    with pytest.raises(RuntimeError, match=r"takes an input of \[batch, channels, \.\.\.\], got \(4,\)"):
        F.batch_norm(make(torch.ones(4), mesh_of((4,)), [Shard(0)]), None, None, training=True)
    assert F.batch_norm(make(torch.ones(0), mesh_of((4,)), [Shard(0)]), None, None, training=True).shape == (0,)


class TestInstanceNorm(Few):
    op = F.instance_norm
    samples = (sample(IMAGES, weight=tensor(8), bias=tensor(8)),)


class TestMarginRanking(Few):
    op = F.margin_ranking_loss
    samples = (sample(VECTOR, VECTOR, torch.tensor([1.0, -1, 1, 1, -1]), 0.2),)


class TestHingeEmbedding(Few):
    op = F.hinge_embedding_loss
    samples = (sample(VECTOR, torch.tensor([1, -1, 1, 1, -1])),)


class TestCosineEmbedding(Few):
    op = F.cosine_embedding_loss
    samples = (
        sample(MATRIX, MATRIX, torch.tensor([1, -1, 1, 1, -1]), 0.1),
        sample(MATRIX, MATRIX, torch.tensor([1, -1, 1, 1, -1]), reduction="sum"),
    )


class TestTripletMargin(Few):
    op = F.triplet_margin_loss
    samples = (sample(MATRIX, MATRIX, MATRIX), sample(MATRIX, MATRIX, MATRIX, swap=True, reduction="none"))


class TestMultiMargin(Few):
    op = F.multi_margin_loss
    samples = (
        sample(MATRIX, tensor(5, dtype=torch.int64)),
        sample(MATRIX, tensor(5, dtype=torch.int64), 2, 0.5),
        sample(tensor(), torch.tensor(0)),
    )


class TestGaussianNLL(Few):
    op = F.gaussian_nll_loss
    samples = (sample(MATRIX, MATRIX, tensor(5, 6, low=0.5, high=2.0)),)


class TestMultilabelSoftMargin(Few):
    op = F.multilabel_soft_margin_loss
    samples = (sample(MATRIX, tensor(5, 6, low=0, high=1, grad=False)),)


class TestRenorm(Few):
    op = torch.renorm
    inplace = "renorm_"
    samples = (sample(MATRIX, 2, 0, 1.5), sample(MATRIX, 1, 1, 2.0), sample(MATRIX, 2, -1, 1.0))


def weight_normed(v, g):
    return torch._weight_norm(v, g, 0)


class TestWeightNorm(Few):
    op = weight_normed
    samples = (sample(MATRIX, tensor(5, 1)),)


class TestSumToSize(Few):
    op = torch.Tensor.sum_to_size
    samples = (sample(tensor(3, 5, 6), 5, 1), sample(MATRIX, (1, 6)))


class TestMsort(Few):
    op = torch.msort
    samples = (sample(MATRIX),)


class TestMultilabelMargin(Few):
    op = F.multilabel_margin_loss
    samples = (
        sample(tensor(3, 4), torch.tensor([[3, 0, -1, 1], [0, 1, 2, 3], [-1, 0, 0, 0]])),
        sample(tensor(), torch.tensor(0)),
    )


class TestCTC(Few):
    op = F.ctc_loss
    samples = (
        sample(
            tensor(5, 3, 4).draw(0).log_softmax(-1),
            torch.tensor([[1, 2], [3, 3], [2, 1]]),
            torch.tensor([5, 4, 5]),
            torch.tensor([2, 1, 2]),
        ),
    )


class TestEmbeddingBag(Few):
    op = F.embedding_bag
    samples = (
        sample(tensor(3, 4, dtype=torch.int64, high=5), tensor(5, 2), padding_idx=1),
        sample(tensor(7, dtype=torch.int64, high=5), tensor(5, 2), torch.tensor([0, 2, 2]), mode="sum"),
    )


class TestCov(Few):
    op = torch.cov
    samples = (
        sample(MATRIX, correction=0),
        sample(VECTOR, aweights=torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])),
        sample(tensor(3, 5, dtype=torch.complex128)),
    )


class TestCorrcoef(Few):
    op = torch.corrcoef
    samples = (sample(MATRIX), sample(tensor(3, 4, dtype=torch.complex128)))


def spectrum(x, window):
    return torch.view_as_real(torch.stft(x, 8, 3, 6, window, return_complex=True))


class TestSTFT(Few):
    op = spectrum
    samples = (sample(tensor(3, 13), tensor(6)),)


@pytest.mark.ranks(4)
def test_stft_refuses_frames_aligned_to_the_window():
    x = make(torch.ones(4, 13), mesh_of((4,)), [Shard(0)])
    with pytest.raises(NotImplementedError, match="no rule for align_to_window: pad the input instead"):
        torch.stft(x, 8, center=False, align_to_window=True, return_complex=True)


def there_and_back(x, window):
    spectra = torch.stft(x, 8, 3, 6, window, return_complex=True)
    frames = torch.stft(
        x, 8, 2, center=False, return_complex=True, onesided=False, window=F.pad(window, (1, 1), value=0.5)
    )
    short = torch.istft(frames, 8, 2, center=False, onesided=False, window=F.pad(window, (1, 1), value=0.5))
    return torch.istft(spectra, 8, 3, 6, window, length=13), torch.istft(spectra, 8, 3, normalized=True), short


class TestISTFT(Few):
    op = there_and_back
    samples = (sample(tensor(3, 14), tensor(6, low=0.5, high=1.0)),)


class TestGradient(Few):
    op = torch.gradient
    samples = (
        sample(MATRIX),
        sample(MATRIX, spacing=None, dim=0),
        sample(MATRIX, spacing=0.5, dim=1, edge_order=2),
        sample(MATRIX, spacing=(torch.tensor([0.0, 1, 3, 4, 7]), torch.tensor([0.0, 1, 2, 4, 5, 9]))).options(
            name="at"
        ),
    )


@pytest.mark.ranks(4)
def test_gradient_refuses_other_orders_at_the_ends():
    x = make(torch.ones(5, 6), mesh_of((4,)), [Shard(0)])
    with pytest.raises(RuntimeError, match="edge_order=2, not 3"):
        torch.gradient(x, edge_order=3)
    with pytest.raises(RuntimeError, match=r"at least edge_order\+1"):
        torch.gradient(x[:2], edge_order=2)


class TestCombinations(Few):
    op = torch.combinations
    samples = (sample(VECTOR), sample(VECTOR, 3, True), sample(tensor(2), 3))


class TestNonzeroStatic(Few):
    op = torch.nonzero_static
    samples = (
        sample(tensor(5, 6, dtype=torch.bool), size=4),
        sample(tensor(3, 2, dtype=torch.bool), size=9, fill_value=7),
    )


class TestNarrowCopy(Few):
    op = torch.narrow_copy
    samples = (sample(MATRIX, 0, 1, 3),)


class TestPDist(Few):
    op = torch.pdist
    samples = (sample(MATRIX), sample(MATRIX, 1.0), sample(MATRIX, 0.0), sample(tensor(3, 2), float("inf")))


def steps(x, h, w_ih, w_hh, b):
    h = torch.gru_cell(x, h, w_ih, w_hh, b)
    h, c = torch.lstm_cell(x, (h, h), torch.cat([w_ih, w_ih[:2]]), torch.cat([w_hh, w_hh[:2]]))
    return torch.rnn_tanh_cell(x, h + c, w_ih[:2], w_hh[:2])


class TestCells(Few):
    op = steps
    max_layouts = 4
    samples = (sample(tensor(3, 4), tensor(3, 2), tensor(6, 4), tensor(6, 2), tensor(6)),)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("placement", "forward", "backward"),
    [
        (Shard(0), {"all_gather": 1}, {"reduce_scatter": 1}),  # every variable with all
        (Shard(1), {"all_reduce": 2}, {"all_reduce": 1}),  # of the means, and of the result when it is read
    ],
)
def test_covariances_of_sharded_variables_and_observations(placement, forward, backward):
    value = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = value.clone().requires_grad_()
    want = torch.cov(plain)
    want.square().sum().backward()
    x = make(value, mesh_of((4,)), [placement], requires_grad=True)
    with CommTrace() as trace:
        out = torch.cov(x).reduce_partial()
    assert trace.counts == forward
    assert out.placements == ((Shard(0),) if placement == Shard(0) else (Replicate(),))
    loss = out.square().sum().reduce_partial()
    with CommTrace() as trace:
        loss.backward()
    assert trace.counts == backward
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
