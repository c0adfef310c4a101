"""Functions that share a rule with one that has tests of its own, each against plain torch: another rank, another name,
another decomposition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Replicate, distribute_tensor
from hyper_parallel.testing import check_op, tensor

MATRIX = (tensor(5, 6),)
VECTOR = (tensor(5),)
PAIR = (tensor(5), tensor(5))
COMPLEX = (tensor(5, 6, dtype=torch.complex128),)
SIGNAL = (tensor(3, 5, 4),)
SEVERAL = (tensor(3, 4, 4),)
LINE, PLANE, SPACE = (tensor(2, 3, 6),), (tensor(2, 3, 4, 6),), (tensor(2, 3, 4, 4, 6),)
CUBE = (tensor(2, 4, 4),)


def definite(x):
    """Symmetric, positive definite, of distinct eigenvalues."""
    steps = torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype).diag()
    if isinstance(x, DTensor):
        steps = distribute_tensor(steps, x.device_mesh, [Replicate()] * x.device_mesh.ndim, src_data_rank=None)
    return x @ x.mT + steps


def of_definite(function):
    return lambda x: function(definite(x))


CALLS = {
    # Vectors and matrices.
    "vdot": (torch.vdot, PAIR),
    "dot": (torch.dot, PAIR),
    "mv": (torch.mv, (tensor(5, 6), tensor(6))),
    "ger": (torch.ger, PAIR),
    "chain_matmul": (torch.chain_matmul, (tensor(5, 6), tensor(6, 3), tensor(3, 4))),
    "multi_dot": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (tensor(5, 6), tensor(6, 3), tensor(3, 4))),
    "__rmatmul__": (torch.Tensor.__rmatmul__, (tensor(6, 3), tensor(5, 6))),
    "trapz": (torch.trapz, MATRIX),
    # Names of views.
    "adjoint": (torch.adjoint, COMPLEX),
    "atleast_1d": (torch.atleast_1d, (tensor(),)),
    "atleast_2d": (torch.atleast_2d, VECTOR),
    "atleast_3d": (torch.atleast_3d, MATRIX),
    "moveaxis": (lambda x: torch.moveaxis(x, 0, 2), SIGNAL),
    "swapdims": (lambda x: torch.swapdims(x, 0, 2), SIGNAL),
    "ravel": (torch.ravel, (tensor(4, 6),)),
    "reshape_as": (torch.Tensor.reshape_as, (tensor(4, 6), tensor(2, 2, 6))),
    "view_as": (torch.Tensor.view_as, (tensor(4, 6), tensor(2, 2, 6))),
    "broadcast_tensors": (torch.broadcast_tensors, (tensor(5, 1), tensor(6))),
    "hsplit": (lambda x: torch.hsplit(x, 2), MATRIX),
    "vsplit": (lambda x: torch.vsplit(x, [2]), MATRIX),
    "dsplit": (lambda x: torch.dsplit(x, 2), SIGNAL),
    "unsafe_chunk": (lambda x: torch.unsafe_chunk(x, 3), MATRIX),
    "unsafe_split": (lambda x: torch.unsafe_split(x, 2, 1), MATRIX),
    "unsafe_split_with_sizes": (lambda x: torch.unsafe_split_with_sizes(x, [1, 4]), MATRIX),
    "fliplr": (torch.fliplr, MATRIX),
    "flipud": (torch.flipud, MATRIX),
    "row_stack": (lambda a, b: torch.row_stack((a, b)), PAIR),
    "concat": (lambda a, b: torch.concat((a, b)), PAIR),
    "concatenate": (lambda a, b: torch.concatenate((a, b), 1), (tensor(5, 6), tensor(5, 2))),
    "diagflat": (torch.diagflat, VECTOR),
    "constant_pad_nd": (lambda x: torch.constant_pad_nd(x, (1, 2, 0, 1), 0.5), MATRIX),
    # Reading and reducing.
    "argwhere": (torch.argwhere, (tensor(5, 6, dtype=torch.int64, high=2),)),
    "unravel_index": (lambda x: torch.unravel_index(x, (2, 3)), (tensor(5, dtype=torch.int64, high=6),)),
    "nanquantile": (lambda x: torch.nanquantile(x, 0.3, 1), MATRIX),
    "norm_except_dim": (torch.norm_except_dim, SIGNAL),
    "is_nonzero": (torch.is_nonzero, (tensor(1),)),
    "_is_all_true": (torch._is_all_true, (tensor(5, dtype=torch.bool),)),
    "_is_any_true": (torch._is_any_true, (tensor(5, dtype=torch.bool),)),
    # Casts.
    "byte": (torch.Tensor.byte, (tensor(5, 6, low=0, high=9),)),
    "char": (torch.Tensor.char, MATRIX),
    "short": (torch.Tensor.short, MATRIX),
    "cdouble": (torch.Tensor.cdouble, MATRIX),
    "cfloat": (torch.Tensor.cfloat, (tensor(5, 6, dtype=torch.float32),)),
    # Decompositions and functions of matrices.
    "cholesky": (of_definite(torch.cholesky), SEVERAL),
    "linalg.cholesky": (of_definite(torch.linalg.cholesky), SEVERAL),
    "cholesky_inverse": (of_definite(torch.cholesky_inverse), SEVERAL),
    "cholesky_solve": (lambda x, b: torch.cholesky_solve(b, definite(x)), (*SEVERAL, tensor(3, 4, 2))),
    "orgqr": (lambda x: torch.orgqr(x, x[..., 0]), SEVERAL),
    "pinverse": (of_definite(torch.pinverse), SEVERAL),
    "linalg.pinv": (of_definite(torch.linalg.pinv), SEVERAL),
    "qr": (torch.qr, SEVERAL),
    "linalg.qr": (torch.linalg.qr, SEVERAL),
    "linalg.lu": (torch.linalg.lu, SEVERAL),
    "svd": (lambda x: torch.svd(definite(x))[1], SEVERAL),
    "linalg.svd": (lambda x: torch.linalg.svd(definite(x))[1], SEVERAL),
    "linalg.svdvals": (of_definite(torch.linalg.svdvals), SEVERAL),
    "linalg.eigh": (lambda x: torch.linalg.eigh(definite(x))[0], SEVERAL),
    "linalg.eigvalsh": (of_definite(torch.linalg.eigvalsh), SEVERAL),
    "linalg.eig": (lambda x: torch.linalg.eig(definite(x))[0].abs(), SEVERAL),
    "linalg.eigvals": (lambda x: torch.linalg.eigvals(definite(x)).abs(), SEVERAL),
    "linalg.matrix_rank": (torch.linalg.matrix_rank, SEVERAL),
    "matrix_exp": (torch.matrix_exp, SEVERAL),
    "linalg.matrix_exp": (torch.linalg.matrix_exp, SEVERAL),
    "matrix_power": (lambda x: torch.matrix_power(x, 3), SEVERAL),
    "linalg.matrix_power": (lambda x: torch.linalg.matrix_power(x, 2), SEVERAL),
    "logdet": (of_definite(torch.logdet), SEVERAL),
    # Transforms.
    "fft2": (torch.fft.fft2, SIGNAL),
    "ifft": (torch.fft.ifft, SIGNAL),
    "ifft2": (torch.fft.ifft2, SIGNAL),
    "ifftn": (torch.fft.ifftn, SIGNAL),
    "rfft": (torch.fft.rfft, SIGNAL),
    "rfft2": (torch.fft.rfft2, SIGNAL),
    "rfftn": (torch.fft.rfftn, SIGNAL),
    "irfft2": (torch.fft.irfft2, SIGNAL),
    "irfftn": (torch.fft.irfftn, SIGNAL),
    "hfft": (torch.fft.hfft, SIGNAL),
    "hfftn": (torch.fft.hfftn, SIGNAL),
    "ihfft": (torch.fft.ihfft, SIGNAL),
    "ihfft2": (torch.fft.ihfft2, SIGNAL),
    # Images of other ranks.
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2, 1), SPACE),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, 1), SPACE),
    "max_pool1d_with_indices": (lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), LINE),
    "max_pool2d_with_indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), PLANE),
    "max_pool3d_with_indices": (lambda x: F.max_pool3d(x, 2, return_indices=True), SPACE),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)), SPACE),
    "adaptive_max_pool1d_with_indices": (lambda x: F.adaptive_max_pool1d(x, 4, return_indices=True), LINE),
    "adaptive_max_pool2d_with_indices": (lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), PLANE),
    "adaptive_max_pool3d_with_indices": (lambda x: F.adaptive_max_pool3d(x, 2, return_indices=True), SPACE),
    "lp_pool1d": (lambda x: F.lp_pool1d(x, 2, 2), LINE),
    "lp_pool3d": (lambda x: F.lp_pool3d(x, 2, 2), SPACE),
    "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), PLANE),
    "max_unpool3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), SPACE),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (*PLANE, tensor(3, 2, 2, 3))),
    "conv_transpose3d": (lambda x, w: F.conv_transpose3d(x, w, padding=1), (*SPACE, tensor(3, 2, 3, 2, 3))),
    # Others written in Python.
    "rnn_relu_cell": (torch.rnn_relu_cell, (tensor(3, 5), tensor(3, 4), tensor(4, 5), tensor(4, 4))),
    "triplet_margin_with_distance_loss": (
        F.triplet_margin_with_distance_loss, (tensor(5, 3), tensor(5, 3), tensor(5, 3)),
    ),
}  # fmt: skip


def call(*args, name):
    return CALLS[name][0](*args)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_function(ranks, name):
    check_op(ranks, call, *CALLS[name][1], name=name, meshes=((2, 2),), max_layouts=6)
