"""Reductions against plain torch, on all layouts."""

import torch

from hyper_parallel.context import module_call
from hyper_parallel.testing import OpConformance, at_most, sample, tensor


class Reductions(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 15


MATRIX = tensor(5, 6)
COMPLEX = tensor(3, 5, dtype=torch.complex128)
THIN = tensor(2, 1, 5)  # some ranks hold nothing


class TestSum(Reductions):
    op = torch.sum
    max_collectives = at_most()
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
    max_collectives = at_most()
    samples = (
        sample(MATRIX),
        sample(MATRIX, 0),
        sample(MATRIX, dim=-1, keepdim=True),
        sample(THIN, (0, 2)),
        sample(tensor(5, 6, dtype=torch.bfloat16), 0),
    )


class TestNanSum(Reductions):
    op = torch.nansum
    max_collectives = at_most()
    samples = (sample(torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, 5.0, 6.0]]), 0),)


class TestCountNonzero(Reductions):
    op = torch.count_nonzero
    max_collectives = at_most()
    samples = (sample(tensor(5, 3, dtype=torch.int64, low=0, high=2)), sample(tensor(5, 3, dtype=torch.bool), dim=0))


class TestProd(Reductions):
    op = torch.prod
    max_collectives = at_most(all_gather=1)
    samples = (
        sample(MATRIX, 0),
        sample(torch.tensor([1.0, 0.0, 3.0, 2.0, 5.0], dtype=torch.float64)),
        sample(THIN, 2, keepdim=True),
        sample(tensor(5, 6, dtype=torch.int64, low=1, high=3), 1),
    )


class TestAny(Reductions):
    op = torch.any
    max_collectives = at_most()
    samples = (
        sample(tensor(5, 3, dtype=torch.bool)),
        sample(THIN, dim=0),
        sample(tensor(5, dtype=torch.bool), 0, True),
    )


class TestAll(Reductions):
    op = torch.all
    max_collectives = at_most()
    samples = (sample(tensor(5, 3, dtype=torch.bool), 0), sample(tensor(2, dtype=torch.bool)))


TIES = torch.tensor([[1.0, 3.0, 3.0], [3.0, 0.0, 3.0], [2.0, 3.0, 1.0]], dtype=torch.float64)
NANS = torch.tensor([1.0, torch.nan, 3.0, torch.nan, 2.0], dtype=torch.float64)


class TestAmax(Reductions):
    op = torch.amax
    max_collectives = at_most(all_reduce=1)
    samples = (
        sample(MATRIX, 0),
        sample(MATRIX, (0, 1)),
        sample(THIN, -1, keepdim=True),
        sample(tensor(5, 6, dtype=torch.int64, low=-9), 0),
        sample(tensor(3, 2, dtype=torch.bfloat16), 0),
    )


class TestAmin(Reductions):
    op = torch.amin
    max_collectives = at_most(all_reduce=1)
    samples = (sample(MATRIX, 1), sample(tensor(2, 3, dtype=torch.int32, low=-9), (0, 1)))


class TestMax(Reductions):
    op = torch.max
    max_collectives = at_most(all_reduce=2)
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
    max_collectives = at_most(all_reduce=2)
    samples = (sample(MATRIX), sample(TIES, 0), sample(NANS, 0).options(name="nan"), sample(MATRIX, other=MATRIX))


def nan_extremes(x):
    with module_call():  # so that a pending x is summed once for both
        return x.max(), x.amin(0)


class TestNan(Reductions):
    """One rank's NaN is everyone's, pending or not."""

    op = nan_extremes
    max_collectives = at_most(all_reduce=2)
    samples = (sample(NANS.float()), sample(tensor(3)))


class TestArgmax(Reductions):
    op = torch.argmax
    max_collectives = at_most(all_reduce=2)
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
    max_collectives = at_most(all_reduce=2)
    samples = (sample(MATRIX, 1), sample(tensor(5, 6, dtype=torch.int64)))


class TestAminmax(Reductions):
    op = torch.aminmax
    max_collectives = at_most(all_reduce=2)
    samples = (sample(MATRIX), sample(MATRIX, dim=0), sample(THIN, dim=0, keepdim=True))


class TestVar(Reductions):
    op = torch.var
    max_collectives = at_most(all_reduce=2)
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
    max_collectives = at_most(all_reduce=2)
    samples = (sample(MATRIX, 0), sample(MATRIX, 1, correction=0), sample(COMPLEX, 1))


class TestVarMean(Reductions):
    op = torch.var_mean
    max_collectives = at_most(all_reduce=2)
    samples = (sample(MATRIX), sample(MATRIX, dim=1, keepdim=True), sample(THIN, dim=0), sample(COMPLEX))


class TestStdMean(Reductions):
    op = torch.std_mean
    max_collectives = at_most(all_reduce=2)
    samples = (sample(MATRIX, 0),)


class TestLogsumexp(Reductions):
    op = torch.logsumexp
    max_collectives = at_most(all_reduce=2)
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
    max_collectives = at_most(all_reduce=1)
    samples = (
        *(sample(MATRIX, p) for p in (2.0, 1, 0, torch.inf, -torch.inf, -1.5)),
        *(sample(MATRIX, p, 0) for p in (2, 1.5)),
        sample(THIN, 3, dim=(0, 2), keepdim=True),
        sample(tensor(5, 6, dtype=torch.float32, grad=False), 2),
    )


class TestNorm(Reductions):
    op = torch.norm
    max_collectives = at_most(all_reduce=1)
    samples = (sample(MATRIX), sample(MATRIX, 1, 0), sample(MATRIX, p="fro", dim=1, keepdim=True))


class TestLinalgNorm(Reductions):
    op = torch.linalg.norm
    max_collectives = at_most(all_gather=1, all_reduce=2, all_to_all=1)
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
    max_collectives = at_most(all_gather=1)
    inplace = "cumsum_"
    samples = (
        sample(MATRIX, 0),
        sample(MATRIX, dim=1),
        sample(THIN, 0),
        sample(tensor(7, dtype=torch.int32), 0, dtype=torch.int32),
    )


class TestCumsumOfWholeParts(Reductions):
    op = torch.cumsum
    max_collectives = at_most(all_gather=1)
    samples = (sample(tensor(5, 6, high=9, grad=False), 0, dtype=torch.int64),)


class TestTopk(Reductions):
    op = torch.topk
    max_collectives = at_most(all_gather=1)
    samples = (
        sample(MATRIX, 3),
        sample(MATRIX, k=2, dim=0, largest=False),
        sample(tensor(2, 3, 5), 4, -1),
        sample(tensor(5, 2, dtype=torch.float32), 5, 0),
        sample(torch.tensor([2.0, -torch.inf, 1.0, torch.nan, -torch.inf, 5.0], dtype=torch.float64), 4),
    )


class TestSort(Reductions):
    op = torch.sort
    max_collectives = at_most(all_to_all=3)
    samples = (sample(MATRIX), sample(MATRIX, 0, True), sample(THIN, dim=1), sample(tensor(2, 5, 3, 1), dim=1))


class TestArgsort(Reductions):
    op = torch.argsort
    max_collectives = at_most(all_to_all=2)
    samples = (sample(MATRIX), sample(MATRIX, dim=0, descending=True))


class TestMedian(Reductions):
    op = torch.median
    max_collectives = at_most(all_gather=2, all_to_all=1)
    samples = (sample(MATRIX), sample(MATRIX, 0), sample(MATRIX, dim=0, keepdim=True), sample(NANS))


class TestNanmedian(Reductions):
    op = torch.nanmedian
    max_collectives = at_most(all_gather=2, all_to_all=1)
    samples = (sample(NANS), sample(MATRIX, 1))


class TestKthvalue(Reductions):
    op = torch.kthvalue
    max_collectives = at_most(all_gather=2, all_to_all=1)
    samples = (sample(MATRIX, 2), sample(MATRIX, k=5, dim=0, keepdim=True), sample(tensor(3, 2, 5), 2, 0))


class TestMode(Reductions):
    op = torch.mode
    max_collectives = at_most(all_gather=2, all_to_all=1)
    samples = (sample(tensor(5, 6, dtype=torch.int64), 0), sample(tensor(7, dtype=torch.int64)))


class TestCumprod(Reductions):
    op = torch.cumprod
    max_collectives = at_most(all_gather=1)
    inplace = "cumprod_"
    samples = (
        sample(MATRIX, 0),
        sample(torch.tensor([1.0, 2.0, 0.0, 3.0, 0.0, 5.0], dtype=torch.float64), 0),
        sample(THIN, 0, dtype=torch.float64),
    )


class TestLogcumsumexp(Reductions):
    op = torch.logcumsumexp
    max_collectives = at_most(all_gather=1)
    samples = (
        sample(MATRIX, 0),
        sample(tensor(2, 6), 1),
        sample(torch.tensor([0.5, -torch.inf, -torch.inf, 1.0, -torch.inf, 2.0], dtype=torch.float64), 0).options(
            name="inf"
        ),
    )


class TestCummax(Reductions):
    op = torch.cummax
    max_collectives = at_most(all_gather=2)
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
    max_collectives = at_most(all_gather=2)
    samples = (
        sample(MATRIX, 0),
        sample(tensor(9, dtype=torch.int64), 0),
        sample(tensor(9, dtype=torch.int32), 0),
        sample(tensor(5, dtype=torch.bool), 0),
    )
