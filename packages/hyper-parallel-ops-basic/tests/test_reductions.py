"""Reductions against plain torch, on all layouts."""

import torch

from hyper_parallel.testing import OpConformance, sample, tensor


class Reductions(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 15


MATRIX = tensor(5, 6)
COMPLEX = tensor(3, 5, dtype=torch.complex128)
THIN = tensor(2, 1, 5)  # some ranks hold nothing


class TestSum(Reductions):
    op = torch.sum
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(MATRIX, dim=1, keepdim=True),
        sample(THIN, (0, -1)),
        sample(tensor()),
        sample(tensor(5, 6, dtype=torch.int32, low=-3), axis=0),
        sample(MATRIX, dtype=torch.float32),
        sample(tensor(5, 6, high=9, grad=False), 0, dtype=torch.int64).options(name="of_whole_parts"),
    )


class TestMean(Reductions):
    op = torch.mean
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(MATRIX, dim=-1, keepdim=True),
        sample(THIN, (0, 2)),
        sample(tensor(5, 6, dtype=torch.bfloat16), 0),
    )


class TestNanSum(Reductions):
    op = torch.nansum
    samples = (sample(torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, 5.0, 6.0]]), 0),)


class TestCountNonzero(Reductions):
    op = torch.count_nonzero
    samples = (sample(tensor(5, 3, dtype=torch.int64, low=0, high=2)), sample(tensor(5, 3, dtype=torch.bool), dim=0))


class TestProd(Reductions):
    op = torch.prod
    samples = (
        sample(MATRIX, 0),
        sample(torch.tensor([1.0, 0.0, 3.0, 2.0, 5.0], dtype=torch.float64)),
        sample(THIN, 2, keepdim=True),
        sample(tensor(5, 6, dtype=torch.int64, low=1, high=3), 1),
    )


class TestAny(Reductions):
    op = torch.any
    samples = (
        sample(tensor(5, 3, dtype=torch.bool)),
        sample(THIN, dim=0),
        sample(tensor(5, dtype=torch.bool), 0, True),
    )


class TestAll(Reductions):
    op = torch.all
    samples = (sample(tensor(5, 3, dtype=torch.bool), 0), sample(tensor(2, dtype=torch.bool)))


TIES = torch.tensor([[1.0, 3.0, 3.0], [3.0, 0.0, 3.0], [2.0, 3.0, 1.0]], dtype=torch.float64)
NANS = torch.tensor([1.0, torch.nan, 3.0, torch.nan, 2.0], dtype=torch.float64)


class TestAmax(Reductions):
    op = torch.amax
    samples = (
        sample(MATRIX, 0),
        sample(MATRIX, (0, 1)),
        sample(THIN, -1, keepdim=True),
        sample(tensor(5, 6, dtype=torch.int64, low=-9), 0),
        sample(tensor(3, 2, dtype=torch.bfloat16), 0),
    )


class TestAmin(Reductions):
    op = torch.amin
    samples = (sample(MATRIX, 1), sample(tensor(2, 3, dtype=torch.int32, low=-9), (0, 1)))


class TestMax(Reductions):
    op = torch.max
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(TIES, 1),
        sample(THIN, dim=2, keepdim=True),
        sample(NANS, 0).options(name="nan"),
        sample(NANS).options(name="nan of all"),
        sample(tensor(5, 6, dtype=torch.int64, low=-9), 1),
        sample(MATRIX, tensor(1, 6)),
        sample(tensor(5, 2, dtype=torch.float32, grad=False)),
    )


class TestMin(Reductions):
    op = torch.min
    samples = (sample(MATRIX), sample(TIES, 0), sample(NANS, 0).options(name="nan"), sample(MATRIX, other=MATRIX))


def nan_extremes(x):
    return x.max(), x.amin(0)


class TestNan(Reductions):
    """One rank's NaN is everyone's, pending or not."""

    op = nan_extremes
    samples = (sample(NANS.float()), sample(tensor(3)))


class TestArgmax(Reductions):
    op = torch.argmax
    samples = (
        sample(MATRIX),
        sample(TIES),
        sample(TIES, 0),
        sample(THIN, dim=2, keepdim=True),
        sample(NANS),
        sample(tensor(2, 3, 2), keepdim=True),
    )


class TestArgmin(Reductions):
    op = torch.argmin
    samples = (sample(MATRIX, 1), sample(tensor(5, 6, dtype=torch.int64)))


class TestAminmax(Reductions):
    op = torch.aminmax
    samples = (sample(MATRIX), sample(MATRIX, dim=0), sample(THIN, dim=0, keepdim=True))


class TestVar(Reductions):
    op = torch.var
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(THIN, (0, 2), keepdim=True),
        sample(MATRIX, False),
        sample(MATRIX, 1, False, True),
        sample(MATRIX, dim=0, correction=0.5),
        sample(tensor(5, 6, dtype=torch.float32), 0),
        sample(COMPLEX, 0),
    )


class TestStd(Reductions):
    op = torch.std
    samples = (sample(MATRIX, 0), sample(MATRIX, 1, correction=0), sample(COMPLEX, 1))


class TestVarMean(Reductions):
    op = torch.var_mean
    samples = (sample(MATRIX), sample(MATRIX, dim=1, keepdim=True), sample(THIN, dim=0), sample(COMPLEX))


class TestStdMean(Reductions):
    op = torch.std_mean
    samples = (sample(MATRIX, 0),)


class TestLogsumexp(Reductions):
    op = torch.logsumexp
    samples = (
        sample(MATRIX, 0),
        sample(MATRIX, (0, 1)),
        sample(THIN, -1, keepdim=True),
        sample(torch.tensor([[-torch.inf, 1.0], [-torch.inf, 2.0]], dtype=torch.float64), 0).options(name="inf"),
        sample(COMPLEX, 0),
        sample(tensor(5, 3, dtype=torch.int64), 0),
    )


class TestVectorNorm(Reductions):
    op = torch.linalg.vector_norm
    samples = (
        *(sample(MATRIX, p) for p in (2.0, 1, 0, torch.inf, -torch.inf, -1.5)),
        *(sample(MATRIX, p, 0) for p in (2, 1.5)),
        sample(THIN, 3, dim=(0, 2), keepdim=True),
        sample(tensor(5, 6, dtype=torch.float32, grad=False), 2),
    )


class TestNorm(Reductions):
    op = torch.norm
    samples = (sample(MATRIX), sample(MATRIX, 1, 0), sample(MATRIX, p="fro", dim=1, keepdim=True))


class TestLinalgNorm(Reductions):
    op = torch.linalg.norm
    samples = (
        sample(MATRIX),
        sample(MATRIX, 2, 0),
        sample(tensor(3, 4, 2), "fro", dim=(1, 2)),
        sample(MATRIX, 1),
        sample(MATRIX, -torch.inf),
        sample(tensor(2, 5, 3), torch.inf, dim=(2, 0), keepdim=True),
        sample(tensor(5, 3, 2), 2, dim=(1, 2)),
    )


class TestCumsum(Reductions):
    op = torch.cumsum
    inplace = "cumsum_"
    samples = (
        sample(MATRIX, 0),
        sample(MATRIX, dim=1),
        sample(THIN, 0),
        sample(tensor(7, dtype=torch.int32), 0, dtype=torch.int32),
    )


class TestCumsumOfWholeParts(Reductions):
    op = torch.cumsum
    samples = (sample(tensor(5, 6, high=9, grad=False), 0, dtype=torch.int64),)


class TestTopk(Reductions):
    op = torch.topk
    samples = (
        sample(MATRIX, 3),
        sample(MATRIX, k=2, dim=0, largest=False),
        sample(tensor(2, 3, 5), 4, -1),
        sample(tensor(5, 2, dtype=torch.float32), 5, 0),
        sample(torch.tensor([2.0, -torch.inf, 1.0, torch.nan, -torch.inf, 5.0], dtype=torch.float64), 4),
    )


class TestSort(Reductions):
    op = torch.sort
    samples = (sample(MATRIX), sample(MATRIX, 0, True), sample(THIN, dim=1), sample(tensor(2, 5, 3, 1), dim=1))


class TestArgsort(Reductions):
    op = torch.argsort
    samples = (sample(MATRIX), sample(MATRIX, dim=0, descending=True))


class TestMedian(Reductions):
    op = torch.median
    samples = (sample(MATRIX), sample(MATRIX, 0), sample(MATRIX, dim=0, keepdim=True), sample(NANS))


class TestNanmedian(Reductions):
    op = torch.nanmedian
    samples = (sample(NANS), sample(MATRIX, 1))


class TestKthvalue(Reductions):
    op = torch.kthvalue
    samples = (sample(MATRIX, 2), sample(MATRIX, k=5, dim=0, keepdim=True), sample(tensor(3, 2, 5), 2, 0))


class TestMode(Reductions):
    op = torch.mode
    samples = (sample(tensor(5, 6, dtype=torch.int64), 0), sample(tensor(7, dtype=torch.int64)))


class TestCumprod(Reductions):
    op = torch.cumprod
    inplace = "cumprod_"
    samples = (
        sample(MATRIX, 0),
        sample(torch.tensor([1.0, 2.0, 0.0, 3.0, 0.0, 5.0], dtype=torch.float64), 0),
        sample(THIN, 0, dtype=torch.float64),
    )


class TestLogcumsumexp(Reductions):
    op = torch.logcumsumexp
    samples = (
        sample(MATRIX, 0),
        sample(tensor(2, 6), 1),
        sample(torch.tensor([0.5, -torch.inf, -torch.inf, 1.0, -torch.inf, 2.0], dtype=torch.float64), 0).options(
            name="inf"
        ),
    )


class TestCummax(Reductions):
    op = torch.cummax
    samples = (
        sample(MATRIX, 1),
        sample(MATRIX, 0),
        sample(tensor(9, dtype=torch.int64), 0),
        sample(NANS, 0),
        sample(tensor(3, 2), 0),
        sample(tensor(3, 2, dtype=torch.bool), 0),
    )


class TestCummin(Reductions):
    op = torch.cummin
    samples = (
        sample(MATRIX, 0),
        sample(tensor(9, dtype=torch.int64), 0),
        sample(tensor(9, dtype=torch.int32), 0),
        sample(tensor(5, dtype=torch.bool), 0),
    )
