"""Reductions against plain torch, on all layouts."""

import torch
from hyper_parallel.testing import OpConformance, sample, tensor

MATRIX = tensor(5, 6)
THIN = tensor(2, 1, 5)  # some ranks hold nothing


class TestSum(OpConformance):
    op = torch.sum
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(MATRIX, dim=1, keepdim=True),
        sample(THIN, (0, -1)),
        sample(tensor()),
        sample(tensor(5, 6, dtype=torch.int32, low=-3), axis=0),
        sample(MATRIX, dtype=torch.float32),
    )


class TestMean(OpConformance):
    op = torch.mean
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(MATRIX, dim=-1, keepdim=True),
        sample(THIN, (0, 2)),
        sample(tensor(5, 6, dtype=torch.bfloat16), 0),
    )


class TestNanSum(OpConformance):
    op = torch.nansum
    samples = (sample(torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, 5.0, 6.0]]), 0),)


class TestCountNonzero(OpConformance):
    op = torch.count_nonzero
    samples = (sample(tensor(5, 3, dtype=torch.int64, low=0, high=2)), sample(tensor(5, 3, dtype=torch.bool), dim=0))


class TestProd(OpConformance):
    op = torch.prod
    samples = (
        sample(MATRIX, 0),
        sample(torch.tensor([1.0, 0.0, 3.0, 2.0, 5.0], dtype=torch.float64)),
        sample(THIN, 2, keepdim=True),
        sample(tensor(5, 6, dtype=torch.int64, low=1, high=3), 1),
    )


class TestAny(OpConformance):
    op = torch.any
    samples = (sample(tensor(5, 3, dtype=torch.bool)), sample(THIN, dim=0), sample(tensor(5, dtype=torch.bool), 0, True))


class TestAll(OpConformance):
    op = torch.all
    samples = (sample(tensor(5, 3, dtype=torch.bool), 0), sample(tensor(2, dtype=torch.bool)))


TIES = torch.tensor([[1.0, 3.0, 3.0], [3.0, 0.0, 3.0], [2.0, 3.0, 1.0]], dtype=torch.float64)
NANS = torch.tensor([1.0, torch.nan, 3.0, torch.nan, 2.0], dtype=torch.float64)


class TestAmax(OpConformance):
    op = torch.amax
    samples = (
        sample(MATRIX, 0),
        sample(MATRIX, (0, 1)),
        sample(THIN, -1, keepdim=True),
        sample(tensor(5, 6, dtype=torch.int64, low=-9), 0),
        sample(tensor(3, 2, dtype=torch.bfloat16), 0),
    )


class TestAmin(OpConformance):
    op = torch.amin
    samples = (sample(MATRIX, 1), sample(tensor(2, 3, dtype=torch.int32, low=-9), (0, 1)))


class TestMax(OpConformance):
    op = torch.max
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(TIES, 1),
        sample(THIN, dim=2, keepdim=True),
        sample(NANS, 0).options(name="nan"),
        sample(tensor(5, 6, dtype=torch.int64, low=-9), 1),
        sample(MATRIX, tensor(1, 6)),
        sample(tensor(5, 2, dtype=torch.float32, grad=False)),
    )


class TestMin(OpConformance):
    op = torch.min
    samples = (sample(MATRIX), sample(TIES, 0), sample(NANS, 0).options(name="nan"), sample(MATRIX, other=MATRIX))


def nan_extremes(x):
    return x.max(), x.amin(0)


class TestNan(OpConformance):
    """One rank's NaN is everyone's, pending or not."""

    op = nan_extremes
    samples = (sample(NANS.float()), sample(tensor(3)))


class TestArgmax(OpConformance):
    op = torch.argmax
    samples = (
        sample(MATRIX),
        sample(TIES),
        sample(TIES, 0),
        sample(THIN, dim=2, keepdim=True),
        sample(NANS),
        sample(tensor(2, 3, 2), keepdim=True),
    )


class TestArgmin(OpConformance):
    op = torch.argmin
    samples = (sample(MATRIX, 1), sample(tensor(5, 6, dtype=torch.int64)))


class TestAminmax(OpConformance):
    op = torch.aminmax
    samples = (sample(MATRIX), sample(MATRIX, dim=0), sample(THIN, dim=0, keepdim=True))


class TestVar(OpConformance):
    op = torch.var
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(THIN, (0, 2), keepdim=True),
        sample(MATRIX, False),
        sample(MATRIX, 1, False, True),
        sample(MATRIX, dim=0, correction=0.5),
        sample(tensor(5, 6, dtype=torch.float32), 0),
    )


class TestStd(OpConformance):
    op = torch.std
    samples = (sample(MATRIX, 0), sample(MATRIX, 1, correction=0))


class TestVarMean(OpConformance):
    op = torch.var_mean
    samples = (sample(MATRIX), sample(MATRIX, dim=1, keepdim=True), sample(THIN, dim=0))


class TestStdMean(OpConformance):
    op = torch.std_mean
    samples = (sample(MATRIX, 0),)


class TestLogsumexp(OpConformance):
    op = torch.logsumexp
    samples = (
        sample(MATRIX, 0),
        sample(MATRIX, (0, 1)),
        sample(THIN, -1, keepdim=True),
        sample(torch.tensor([[-torch.inf, 1.0], [-torch.inf, 2.0]], dtype=torch.float64), 0).options(name="inf"),
    )


class TestVectorNorm(OpConformance):
    op = torch.linalg.vector_norm
    samples = (
        *(sample(MATRIX, p) for p in (2, 2.0, 1, 3, 0, torch.inf, -torch.inf, 2.5)),
        *(sample(MATRIX, p, 0) for p in (2, 1.5, torch.inf)),
        sample(THIN, 2, dim=(0, 2), keepdim=True),
        *(sample(torch.zeros(3, 2, dtype=torch.float64), p, name) for p, name in ((2, 0), (1, 0), (3, 0), (torch.inf, 1))),
        sample(tensor(5, 6, dtype=torch.float32, grad=False), 2),
        sample(MATRIX, 2, dtype=torch.float32),
    )


class TestNorm(OpConformance):
    op = torch.norm
    samples = (sample(MATRIX), sample(MATRIX, 1, 0), sample(MATRIX, p="fro", dim=1, keepdim=True))


class TestLinalgNorm(OpConformance):
    op = torch.linalg.norm
    samples = (sample(MATRIX), sample(MATRIX, 2, 0), sample(tensor(3, 4, 2), "fro", dim=(1, 2)))


class TestCumsum(OpConformance):
    op = torch.cumsum
    samples = (sample(MATRIX, 0), sample(MATRIX, dim=1), sample(THIN, 0), sample(tensor(7, dtype=torch.int32), 0))


class TestTopk(OpConformance):
    op = torch.topk
    samples = (sample(MATRIX, 3), sample(MATRIX, k=2, dim=0, largest=False))


class TestSort(OpConformance):
    op = torch.sort
    samples = (sample(MATRIX), sample(MATRIX, 0, True), sample(THIN, dim=1))


class TestArgsort(OpConformance):
    op = torch.argsort
    samples = (sample(MATRIX), sample(MATRIX, dim=0, descending=True))


class TestMedian(OpConformance):
    op = torch.median
    samples = (sample(MATRIX), sample(MATRIX, 0), sample(MATRIX, dim=0, keepdim=True))


class TestCumprod(OpConformance):
    op = torch.cumprod
    samples = (sample(MATRIX, 0),)


class TestCummax(OpConformance):
    op = torch.cummax
    samples = (sample(MATRIX, 1),)
