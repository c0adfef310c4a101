"""Losses against plain torch, on all layouts."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Shard, distribute_tensor
from hyper_parallel.testing import OpConformance, at_most, sample, tensor
from hyper_parallel.testing.checking import mesh_of

LABELS = tensor(5, dtype=torch.int64, high=6)
IGNORED = torch.tensor([3, -100, 0, -100, 5])
FIRST_IGNORED = torch.tensor([-100, -100, -100, 2, 1])  # some ranks see nothing but ignored targets
ALL_IGNORED = torch.full((5,), -100)
WEIGHT = tensor(6, low=0.5, high=2.0, grad=False)


class TestCrossEntropy(OpConformance):
    op = F.cross_entropy
    max_collectives = at_most(all_reduce=3)
    meshes = ((4,), (2, 2))
    max_layouts = 25
    samples = (
        sample(tensor(5, 6), LABELS),
        sample(tensor(5, 6), FIRST_IGNORED).options(name="ignored"),
        sample(tensor(5, 6), ALL_IGNORED).options(name="all-ignored"),
        sample(tensor(5, 6), IGNORED, WEIGHT, label_smoothing=0.1).options(name="weighted"),
        sample(tensor(5, 6), IGNORED, WEIGHT, reduction="none", label_smoothing=0.3).options(name="none"),
        sample(tensor(5, 6), LABELS, ignore_index=2, reduction="sum").options(name="sum"),
        sample(tensor(2, 7, 3), tensor(2, 3, dtype=torch.int64, high=7), label_smoothing=0.2),
        sample(tensor(7), torch.tensor(4)).options(name="one"),
        sample(tensor(5, 3), tensor(5, 3, low=0.0, high=0.5)).options(name="soft"),
        sample(tensor(3, 5, 2), tensor(3, 5, 2, low=0.0), tensor(5, low=0.5, grad=False), label_smoothing=0.2).options(
            name="soft-weighted"
        ),
    )


class TestNLLLoss(OpConformance):
    op = F.nll_loss
    max_collectives = at_most(all_reduce=2)
    meshes = ((4,), (2, 2))
    max_layouts = 25
    samples = (
        sample(tensor(5, 6), ALL_IGNORED).options(name="all-ignored"),
        sample(tensor(5, 6), FIRST_IGNORED).options(name="ignored"),
        sample(tensor(5, 6), IGNORED, WEIGHT).options(name="weighted"),
        sample(tensor(2, 7, 3), tensor(2, 3, dtype=torch.int64, high=7), reduction="none"),
        sample(tensor(5, 6), LABELS, reduction="sum"),
    )


CHUNKS = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None, allow_retain_graph=True)
BIAS = tensor(6)


class TestLinearCrossEntropy(OpConformance):
    op = F.linear_cross_entropy
    max_collectives = at_most(all_reduce=3, reduce_scatter=1)
    meshes = ((4,), (2, 2))
    max_layouts = 15
    samples = (
        sample(tensor(5, 3), tensor(6, 3), IGNORED, linear_bias=BIAS).options(name="whole"),
        sample(tensor(5, 3), tensor(6, 3), IGNORED, linear_bias=BIAS, options=CHUNKS).options(name="chunked"),
        sample(tensor(5, 3), tensor(6, 3), FIRST_IGNORED, weight=WEIGHT, reduction="none", options=CHUNKS).options(
            name="weighted"
        ),
        sample(tensor(5, 3), tensor(6, 3), LABELS, ignore_index=2, reduction="sum", options=CHUNKS).options(name="sum"),
        sample(tensor(3), tensor(6, 3), torch.tensor(4), options=CHUNKS).options(name="one"),
        sample(tensor(5, 3), tensor(6, 3), tensor(5, 6, low=0.0), label_smoothing=0.2).options(name="soft"),
        sample(tensor(2, 3), tensor(5, 2, 3), tensor(2, 2, dtype=torch.int64, high=5)).options(name="k-dimensional"),
    )


class PointwiseLosses(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 15


PAIR = (tensor(5, 6), tensor(5, 6))
CHANCES = (tensor(5, 6, low=0.1, high=0.9), tensor(5, 6, low=0.1, high=0.9))


class TestMSELoss(PointwiseLosses):
    op = F.mse_loss
    max_collectives = at_most(all_reduce=1)
    samples = (
        sample(*PAIR),
        sample(*PAIR, reduction="none"),
        sample(tensor(3, 2), tensor(3, 2), weight=tensor(3, 2, low=0.5)),
    )


class TestL1Loss(PointwiseLosses):
    op = F.l1_loss
    max_collectives = at_most()
    samples = (sample(*PAIR), sample(*PAIR, reduction="sum"))


class TestSmoothL1Loss(PointwiseLosses):
    op = F.smooth_l1_loss
    max_collectives = at_most()
    samples = (sample(*PAIR, beta=0.5),)


class TestHuberLoss(PointwiseLosses):
    op = F.huber_loss
    max_collectives = at_most()
    samples = (sample(*PAIR, delta=0.7), sample(*PAIR, weight=tensor(5, 6, low=0.5)))


class TestSoftMarginLoss(PointwiseLosses):
    op = F.soft_margin_loss
    max_collectives = at_most()
    samples = (sample(tensor(5, 6), tensor(5, 6, grad=False)),)


class TestKLDiv(PointwiseLosses):
    op = F.kl_div
    max_collectives = at_most()
    samples = (
        sample(*CHANCES, reduction="batchmean"),
        sample(*PAIR, log_target=True),
        sample(*CHANCES, reduction="none"),
    )


class TestBCE(PointwiseLosses):
    op = F.binary_cross_entropy
    max_collectives = at_most()
    samples = (sample(*CHANCES), sample(*CHANCES, tensor(6, low=0.5, grad=False)))


class TestBCEWithLogits(PointwiseLosses):
    op = F.binary_cross_entropy_with_logits
    max_collectives = at_most()
    samples = (
        sample(tensor(5, 6), CHANCES[1]),
        sample(tensor(5, 6), CHANCES[1], pos_weight=tensor(6, low=0.5, grad=False)),
    )


class TestPoissonNLLLoss(PointwiseLosses):
    op = F.poisson_nll_loss
    max_collectives = at_most()
    samples = (sample(tensor(5, 6), tensor(5, 6, low=1.0, high=3.0, grad=False)),)


@pytest.mark.ranks(4)
def test_a_target_that_is_no_class_raises_on_every_rank():
    mesh = mesh_of((4,))
    target = torch.tensor([0, 1, 2, 7, 1, 0, 2, 1])
    x = distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)])
    for op in (F.cross_entropy, F.nll_loss):
        for reduction in ("mean", "sum", "none"):
            with pytest.raises(IndexError, match="out of bounds"):
                op(x, distribute_tensor(target, mesh, [Shard(0)]), reduction=reduction)
