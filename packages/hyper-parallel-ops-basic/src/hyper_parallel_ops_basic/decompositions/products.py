"""Products in terms of other functions; see :class:`hyper_parallel_ops_basic.decompositions.composed.Composed`.

Each takes the arguments of the torch function of its name and gives what that gives (https://pytorch.org/docs/stable),
with shards wherever its parts keep them.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel_ops_basic.decompositions.composed import plain_like

Tensor = torch.Tensor


def outer(input: Tensor, vec2: Tensor) -> Tensor:
    return input.unsqueeze(1) * vec2


ger = outer


def addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = alpha * outer(vec1, vec2)
    out = product if beta == 0 else beta * input + product
    # Of booleans the numbers make integers.
    return out.to(torch.promote_types(input.dtype, torch.promote_types(vec1.dtype, vec2.dtype)))


def inner(input: Tensor, other: Tensor) -> Tensor:
    if not input.ndim or not other.ndim:
        return input * other
    return torch.tensordot(input, other, dims=([-1], [-1]))


def vdot(input: Tensor, other: Tensor) -> Tensor:
    return (input.conj() * other).sum() if input.is_complex() else torch.dot(input, other)


def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    return (x.conj() * y if x.is_complex() else x * y).sum(dim)


def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    if isinstance(dims, int):
        dims = (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    elif isinstance(dims, Tensor):
        dims = dims.tolist() if dims.ndim else (list(range(a.ndim - int(dims), a.ndim)), list(range(int(dims))))
    mine, theirs = ([d] if isinstance(d, int) else list(d) for d in dims)
    letters = string.ascii_letters
    left = list(letters[: a.ndim])
    right = list(letters[a.ndim : a.ndim + b.ndim])
    for i, j in zip(mine, theirs, strict=True):
        right[j] = left[i]
    folded = {left[i] for i in mine}
    out = [c for c in left + right if c not in folded]
    # Contiguous also where there is nothing to sum, of which einsum gives the dims as they lie in a and b.
    return torch.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", a, b).contiguous()


def kron(input: Tensor, other: Tensor) -> Tensor:
    ndim = max(input.ndim, other.ndim)
    a, b = (t.reshape((1,) * (ndim - t.ndim) + tuple(t.shape)) for t in (input, other))
    for d in range(ndim):
        a, b = a.unsqueeze(2 * d + 1), b.unsqueeze(2 * d)
    return (a * b).reshape([a.shape[2 * d] * b.shape[2 * d + 1] for d in range(ndim)])


def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        dim = next(d for d, n in enumerate(input.shape) if n == 3)
    first, second = (torch.broadcast_tensors(input, other)) if input.shape != other.shape else (input, other)
    return first.roll(-1, dim) * second.roll(-2, dim) - first.roll(-2, dim) * second.roll(-1, dim)


def cross_of_last(input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """``torch.linalg.cross``; ``torch.cross`` takes the first dim of size 3."""
    return cross(input, other, dim)


def chain_matmul(*matrices: Tensor) -> Tensor:
    out = matrices[0] if len(matrices) > 1 else matrices[0].clone()
    for matrix in matrices[1:]:
        out = out @ matrix
    return out


def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    return chain_matmul(*tensors)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.einsum("...i,kij,...j->...k", input1, weight, input2)
    return out if bias is None else out + bias


def vander(x: Tensor, N: int | None = None) -> Tensor:
    x = x.contiguous() if x.ndim else x.reshape(1)  # its result has the default strides whatever those of x
    count = x.shape[-1] if N is None else N
    if count <= 1 or x.dtype is torch.bool:
        raise RuntimeError(f"vander: expected numbers and N above 1, got {x.dtype} and N = {count}")
    powers = torch.arange(count, device=x.device)
    return x.unsqueeze(-1) ** plain_like(x, powers)


def tensorinv(A: Tensor, ind: int = 2) -> Tensor:
    rows, columns = A.shape[:ind], A.shape[ind:]
    return torch.linalg.inv(A.reshape(math.prod(rows), math.prod(columns))).reshape(*columns, *rows)


def tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    if dims is not None:
        A = A.movedim(list(dims), list(range(A.ndim - len(dims), A.ndim)))
    unknown = A.shape[B.ndim :]
    return torch.linalg.solve(A.reshape(B.numel(), math.prod(unknown)), B.reshape(-1)).reshape(unknown)
