"""Functions of tensors in terms of others; see :class:`hyper_parallel_ops_basic.decompositions.composed.Composed`.

Each takes the arguments of the torch function of its name and gives what that gives (https://pytorch.org/docs/stable),
with shards wherever its parts keep them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel_ops_basic.decompositions.composed import plain_like
from hyper_parallel_ops_basic.random.sampling import drawn_from

Tensor = torch.Tensor


# -- neighbours and sums along a dim -------------------------------------------------------------------------------


def diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    if n == 0:
        return input.clone()  # without what was to be joined, as PyTorch does it
    if prepend is not None or append is not None:
        input = torch.cat([t for t in (prepend, input, append) if t is not None], dim)
    for _ in range(n):
        size = max(input.shape[dim] - 1, 0)
        later, earlier = input.narrow(dim, input.shape[dim] - size, size), input.narrow(dim, 0, size)
        input = later ^ earlier if input.dtype is torch.bool else later - earlier
    return input


def nanmean(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    known = ~input.isnan()
    if dim is None:
        return input.nansum(dtype=dtype) / known.sum()
    return input.nansum(dim, keepdim, dtype=dtype) / known.sum(dim, keepdim)


def trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    return _trapezoids(y, x, dx, dim).sum(dim)


trapz = trapezoid


def cumulative_trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    return _trapezoids(y, x, dx, dim).cumsum(dim)


def _trapezoids(y: Tensor, x: Tensor | None, dx: float, dim: int) -> Tensor:
    size = y.shape[dim] - 1
    pairs = (y.narrow(dim, 1, size) + y.narrow(dim, 0, size)) / 2
    if x is None:
        return pairs * dx
    steps = diff(x, dim=dim if x.ndim == y.ndim else -1)
    if x.ndim == 1:
        steps = steps.reshape([-1 if d == dim % y.ndim else 1 for d in range(y.ndim)])
    return pairs * steps


def gradient(input: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> tuple[Tensor, ...]:
    if edge_order not in (1, 2):
        raise RuntimeError(f"torch.gradient only supports edge_order=1 and edge_order=2, not {edge_order}")
    dims = range(input.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    if any(input.shape[d] <= edge_order for d in dims):
        raise RuntimeError(
            f"torch.gradient expected each dimension size to be at least edge_order+1, got {tuple(input.shape)} with "
            f"edge_order={edge_order}"
        )
    spacing = 1 if spacing is None else spacing
    several = isinstance(spacing, (tuple, list))
    return tuple(
        _slopes(input, spacing[i] if several else spacing, d % input.ndim, edge_order) for i, d in enumerate(dims)
    )


def _slopes(x: Tensor, spacing: Any, dim: int, edge_order: int) -> Tensor:
    """Slope at each position of a dim: through its neighbours inside, and at either end through the nearest ones."""
    n = x.shape[dim]

    def along(t: Tensor, start: int, count: int) -> Tensor:
        return t.narrow(dim, start, count)

    if isinstance(spacing, Tensor) and spacing.ndim:
        steps = diff(spacing).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    else:
        steps = x.new_ones([n - 1 if d == dim else 1 for d in range(x.ndim)]) * spacing
    slopes = (along(x, 1, n - 1) - along(x, 0, n - 1)) / steps  # between neighbours
    before, after = along(steps, 0, n - 2), along(steps, 1, n - 2)
    left, right = along(slopes, 0, n - 2), along(slopes, 1, n - 2)
    inside = (left * after + right * before) / (before + after)
    first, last = along(slopes, 0, 1), along(slopes, n - 2, 1)
    if edge_order == 2:  # the line through the slopes at half steps, extended to the ends
        bent, unbent = (right - left) / (before + after), n - 3
        first = first - along(bent, 0, 1) * along(steps, 0, 1)
        last = last + along(bent, unbent, 1) * along(steps, n - 2, 1)
    return torch.cat([first, inside, last], dim)


# -- diagonals -----------------------------------------------------------------------------------------------------


def trace(input: Tensor) -> Tensor:
    return input.diagonal().sum()


def diag(input: Tensor, diagonal: int = 0) -> Tensor:
    return torch.diag_embed(input, diagonal) if input.ndim == 1 else input.diagonal(diagonal).clone()


def diagflat(input: Tensor, offset: int = 0) -> Tensor:
    return torch.diag_embed(input.reshape(-1), offset)


def diag_embed(input: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    rows = F.pad(input, (max(-offset, 0), max(offset, 0))).unsqueeze(-1)
    size = rows.shape[-2]
    beside = ~torch.ones(size, size, dtype=torch.bool, device=input.device).tril(offset).triu(offset)
    out = rows.masked_fill(plain_like(input, beside), 0)
    return out.movedim((-2, -1), (dim1, dim2)).contiguous()


def diagonal_scatter(input: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    out = input.clone()
    rows, columns = max(-offset, 0), max(offset, 0)
    count = max(min(input.shape[dim1] - rows, input.shape[dim2] - columns), 0)
    along = plain_like(input, torch.arange(count, device=input.device))
    out.movedim((dim1, dim2), (0, 1))[along + rows, along + columns] = src.movedim(-1, 0)
    return out


def fill_diagonal_(input: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    size = min(input.shape)
    along = plain_like(input, torch.arange(size, device=input.device))
    if wrap and input.ndim == 2 and input.shape[0] > input.shape[1] + 1:
        rows = torch.tensor([r for r in range(input.shape[0]) if r % (input.shape[1] + 1) < input.shape[1]])
        rows = plain_like(input, rows.to(input.device))
        input[rows, rows % (input.shape[1] + 1)] = fill_value
        return input
    input[(along,) * input.ndim] = fill_value
    return input


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    out = input.clone()
    out[(slice(None),) * (dim % input.ndim) + (index,)] = src
    return out


def slice_scatter(
    input: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    out = input.clone()
    out[(slice(None),) * (dim % input.ndim) + (slice(start, end, step),)] = src
    return out


# -- norms and sizes -----------------------------------------------------------------------------------------------


def renorm(input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    norms = norm_except_dim(input, p, dim % input.ndim)  # to which -1 would mean no dim
    return (input * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1)).contiguous()


def norm_except_dim(v: Tensor, pow: float = 2, dim: int = 0) -> Tensor:
    if dim == -1:
        return torch.linalg.vector_norm(v, pow)
    dims = [d for d in range(v.ndim) if d != dim % v.ndim]
    return torch.linalg.vector_norm(v, pow, dims, keepdim=True) if dims else v.abs()


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return (v * (g / norm_except_dim(v, 2, dim))).contiguous()


def sum_to_size(input: Tensor, *size: Any) -> Tensor:
    wanted = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    added = input.ndim - len(wanted)
    dims = [d for d in range(input.ndim) if d < added or wanted[d - added] != input.shape[d]]
    out = input.sum(dims, keepdim=True) if dims else input
    return out.reshape(wanted) if added else out


def msort(input: Tensor) -> Tensor:
    return input.sort(0).values


def constant_pad_nd(input: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    return F.pad(input, list(pad), value=value)


def __reversed__(self: Tensor) -> Tensor:
    return self.flip(0) if self.ndim else self


def __rmatmul__(self: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(other, self)


def narrow_copy(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    return input.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def fftshift(input: Tensor, dim: Any = None) -> Tensor:
    dims = _dims_of(input, dim)
    return input.roll([input.shape[d] // 2 for d in dims], dims)


def ifftshift(input: Tensor, dim: Any = None) -> Tensor:
    dims = _dims_of(input, dim)
    return input.roll([-(input.shape[d] // 2) for d in dims], dims)


def _dims_of(input: Tensor, dim: Any) -> list[int]:
    return list(range(input.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)


# -- elements by flat or broadcast index ---------------------------------------------------------------------------


def take(input: Tensor, index: Tensor) -> Tensor:
    return input.reshape(1)[index * 0] if input.ndim == 0 else input[_by_dim(index, input.shape)]


def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    if not input.ndim:
        return put(input.reshape(1), index, source, accumulate).reshape(())
    return input.index_put(_by_dim(index, input.shape), source.reshape(index.shape), accumulate)


def _by_dim(index: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Indices per dim of an index into the flattened tensor."""
    index = torch.where(index < 0, index + math.prod(shape), index)
    found = []
    for size in reversed(shape):
        found.append(index % size)
        index = index // size
    return tuple(reversed(found))


def unravel_index(indices: Tensor, shape: Any) -> tuple[Tensor, ...]:
    found = _by_dim(indices, (shape,) if isinstance(shape, int) else tuple(shape))
    return torch.stack(found, -1).unbind(-1) if found else ()  # which lie side by side


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return take(input, indices.reshape(-1))
    if input.ndim != indices.ndim:
        raise RuntimeError(f"take_along_dim: input has {input.ndim} dims and indices {indices.ndim}, expected as many")
    dim %= input.ndim
    both = zip(input.shape, indices.shape, strict=True)
    sizes = [1 if d == dim else max(a, b) if 0 not in (a, b) else 0 for d, (a, b) in enumerate(both)]
    whole = [input.shape[d] if d == dim else n for d, n in enumerate(sizes)]
    wanted = [indices.shape[d] if d == dim else n for d, n in enumerate(sizes)]
    indices = torch.where(indices < 0, indices + input.shape[dim], indices)
    return input.expand(whole).gather(dim, indices.expand(wanted))


def nonzero_static(input: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    found = input.nonzero()[:size]
    return F.pad(found, (0, 0, 0, size - len(found)), value=fill_value)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = torch.tensor(list(choose(range(len(input)), r)), dtype=torch.int64, device=input.device)
    return input[plain_like(input, chosen.reshape(-1, r))]


# -- activations and distances -------------------------------------------------------------------------------------


def glu(input: Tensor, dim: int = -1) -> Tensor:
    if input.shape[dim] % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {input.shape[dim]}")
    first, gate = input.chunk(2, dim)
    return first * gate.sigmoid()


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1:
        weight = weight.reshape([-1 if d == 1 else 1 for d in range(max(input.ndim, 2))][: max(input.ndim, 1)])
    return torch.where(input > 0, input, weight.reshape(()) * input if weight.numel() == 1 else weight * input)


def rrelu(
    input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """Every element draws a slope, as on no one device: PyTorch's kernels draw for some elements only."""
    # Not empty_like: of a pending tensor that is pending too, where these numbers are needed whole.
    slope = torch.zeros_like(input.detach()).uniform_(lower, upper) if training else (lower + upper) / 2
    out = torch.where(input > 0, input, input * slope)
    return input.copy_(out) if inplace else out


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    x1, x2 = torch.broadcast_tensors(x1, x2)
    lengths = [torch.linalg.vector_norm(x, 2, dim, keepdim=True).clamp_min(eps) for x in (x1, x2)]
    return ((x1 / lengths[0]) * (x2 / lengths[1])).sum(dim)


def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(input - other, p)


def normal(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std
    shape = torch.broadcast_shapes(*(t.shape for t in (mean, std) if isinstance(t, Tensor)))
    drawn = torch.zeros_like(like.detach().expand(shape), memory_format=torch.contiguous_format)
    with torch.no_grad():
        drawn = drawn.normal_(0, 1, generator=generator).mul_(std).add_(mean)
    return drawn_from(drawn, mean, std)
