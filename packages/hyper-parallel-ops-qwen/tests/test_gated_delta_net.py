"""What the gated delta net calls, against plain torch on all layouts."""

from typing import ClassVar

import torch
import torch.nn.functional as F

from hyper_parallel.testing import OpConformance, sample, tensor


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
