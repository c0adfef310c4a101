"""Functions of batches of matrices, and Fourier transforms, against plain torch on all layouts."""

import pytest
import torch

from hyper_parallel import Shard, distribute_tensor
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.placing import mesh_of

SQUARE, RIGHT, TALL = tensor(5, 3, 3), tensor(5, 3, 2), tensor(3, 4, 2)


def batch(*shape):
    """Matrices far from singular."""
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return values + 4 * torch.eye(shape[-2], shape[-1], dtype=torch.float64)


def positive(*shape):
    values = batch(*shape)
    return values @ values.mT


class Few(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 6


class TestCholeskyEx(Few):
    op = torch.linalg.cholesky_ex
    samples = (sample(positive(5, 3, 3)),)


class TestInvEx(Few):
    op = torch.linalg.inv_ex
    samples = (sample(batch(5, 3, 3)),)


class TestLuFactorEx(Few):
    op = torch.linalg.lu_factor_ex
    samples = (sample(batch(5, 3, 3)),)


def by_factors(a, b):
    factors, pivots = torch.linalg.lu_factor(a)
    return (
        torch.linalg.lu_solve(factors, pivots, b),
        torch.lu_solve(b, factors, pivots),
        *torch.lu_unpack(factors, pivots),
    )


class TestLuFactorsInUse(Few):
    op = by_factors
    samples = (sample(batch(5, 3, 3), RIGHT),)


def by_symmetric_factors(a, b):
    factors, pivots = torch.linalg.ldl_factor(a.detach())
    return torch.linalg.ldl_solve(factors, pivots, b.detach()), *torch.linalg.ldl_factor_ex(a.detach())


class TestLdlFactorsInUse(Few):
    op = by_symmetric_factors
    samples = (sample(positive(5, 3, 3), RIGHT),)


class TestSolveEx(Few):
    op = torch.linalg.solve_ex
    samples = (sample(batch(5, 3, 3), RIGHT), sample(batch(5, 3, 3), tensor(5, 3)))


class TestTriangularSolve(Few):
    op = torch.triangular_solve
    samples = (sample(RIGHT, batch(5, 3, 3)),)


class TestHouseholderProduct(Few):
    op = torch.linalg.householder_product
    samples = (sample(TALL, tensor(3, 2)),)


class TestOrmqr(Few):
    op = torch.ormqr
    samples = (sample(TALL, tensor(3, 2), tensor(3, 4, 3)),)


class TestMatmul(Few):
    op = torch.linalg.matmul
    samples = (sample(tensor(3, 4), tensor(4, 5)),)


class TestIntMatmul(Few):
    op = torch._int_mm
    samples = (sample(tensor(5, 8, dtype=torch.int8), tensor(8, 3, dtype=torch.int8)),)


class TestVander(Few):
    op = torch.linalg.vander
    samples = (sample(tensor(2, 5)), sample(tensor(5), N=3), sample(tensor(), N=2))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("dtype", "powers"), [(torch.float64, 1), (torch.bool, 3)])
def test_vander_refuses_what_pytorch_refuses(dtype, powers):
    x = torch.ones(5, dtype=dtype)
    for given in (x, distribute_tensor(x, mesh_of((4,)), [Shard(0)])):
        with pytest.raises(RuntimeError, match=r"vander|N must be"):
            torch.linalg.vander(given, N=powers)


class TestTensorinv(Few):
    op = torch.linalg.tensorinv
    samples = (sample(batch(6, 6).reshape(6, 2, 3), ind=1), sample(batch(6, 6).reshape(2, 3, 6), ind=2))


class TestTensorsolve(Few):
    op = torch.linalg.tensorsolve
    samples = (
        sample(batch(6, 6).reshape(2, 3, 6), tensor(2, 3)),
        sample(batch(6, 6).reshape(2, 3, 2, 3).movedim(2, 0), tensor(2, 3), dims=(0, 3)).options(name="dims"),
    )


class TestNuclearNorm(Few):
    op = torch.norm
    samples = (
        sample(tensor(5, 3), p="nuc"),
        sample(tensor(3, 4, 2), p="nuc", dim=(0, 2), keepdim=True),
    )


def by_name(x):
    return (
        torch.frobenius_norm(x, 0),
        torch.frobenius_norm(x, [0, 1]),
        torch.nuclear_norm(x),
        torch.nuclear_norm(x, (0, 1), True),
    )


class TestNormsByName(Few):
    op = by_name
    samples = (sample(tensor(5, 3)),)


class TestHfft2(Few):
    op = torch.fft.hfft2
    samples = (sample(tensor(3, 4, 3, dtype=torch.complex128)),)


class TestIhfftn(Few):
    op = torch.fft.ihfftn
    samples = (sample(tensor(3, 5, 4)), sample(tensor(5, 4), dim=0))


class TestFftshift(Few):
    op = torch.fft.fftshift
    samples = (sample(tensor(5, 4)), sample(tensor(5, 4), dim=0), sample(tensor(3, 2, 5), dim=(0, 2)))


class TestIfftshift(Few):
    op = torch.fft.ifftshift
    samples = (sample(tensor(5, 4)), sample(tensor(5, 4), dim=0))
