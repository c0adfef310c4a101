"""``torch.linalg.norm`` and ``matrix_norm`` in terms of other functions; see :mod:`.composed`.

Norms by sums (fro, 1, inf) keep every shard; those by singular values (2, nuc) deal out whole matrices to the ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensor = torch.Tensor


def norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """A vector's norm, or a matrix's where ``ord`` is given and two dims are meant."""
    pair = A.ndim == 2 if dim is None else isinstance(dim, (tuple, list)) and len(dim) == 2
    if ord is not None and pair:
        return matrix_norm(A, ord, tuple(range(2)) if dim is None else dim, keepdim, dtype=dtype)
    return torch.linalg.vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


def frobenius_norm(input: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(input, 2, dim if isinstance(dim, int) or dim else None, keepdim)


def nuclear_norm(input: Tensor, dim: Any = (-2, -1), keepdim: bool = False) -> Tensor:
    dims, keepdim = ((-2, -1), dim) if isinstance(dim, bool) else (dim, keepdim)
    return matrix_norm(input, "nuc", dims, keepdim)


def matrix_norm(
    A: Tensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The norm of the matrices in the two dims ``dim``."""
    A = A if dtype is None else A.to(dtype)
    rows, columns = (d % A.ndim for d in dim)
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, (rows, columns), keepdim)
    if ord == "nuc" or abs(ord) == 2:
        values = torch.linalg.svdvals(A.movedim((rows, columns), (-2, -1)))
        out = values.sum(-1) if ord == "nuc" else values.amax(-1) if ord > 0 else values.amin(-1)
        return out.unsqueeze(min(rows, columns)).unsqueeze(max(rows, columns)) if keepdim else out
    if abs(ord) not in (1, math.inf):
        raise RuntimeError(f"linalg.matrix_norm: Order {ord} not supported.")
    summed, other = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = A.abs().sum(summed, keepdim=True)
    out = sums.amax(other, keepdim=True) if ord > 0 else sums.amin(other, keepdim=True)
    return out if keepdim else out.squeeze((rows, columns))
