"""Joining, spreading and rearranging in terms of others; see :mod:`.composed`.

Each takes the arguments of the torch function of its name and gives what that gives (https://pytorch.org/docs/stable),
with shards wherever its parts keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel_ops_basic.decompositions.composed import lying_like

Tensor = torch.Tensor


def dstack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.atleast_3d(t) for t in tensors], 2)


def pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Tensor:
    longest = max(len(t) for t in sequences)
    padded = []
    for tensor in sequences:
        room = (0, 0) * (tensor.ndim - 1)
        missing = longest - len(tensor)
        sides = (0, missing) if padding_side == "right" else (missing, 0)
        padded.append(F.pad(tensor, (*room, *sides), value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(t.numel(), 1) if t.ndim <= 1 else t for t in tensors], 1)


def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    given = tuple(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    shape = torch.broadcast_shapes(*(t.shape for t in given))
    return tuple(t.expand(shape) for t in given)


def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    given = list(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else list(tensors)
    swap = indexing == "xy" and len(given) > 1
    order = [1, 0, *range(2, len(given))] if swap else range(len(given))
    sizes = [given[i].numel() for i in order]
    grids = []
    for i, tensor in enumerate(given):
        place = list(order).index(i)
        view = tensor.reshape([-1 if d == place else 1 for d in range(len(given))])
        grids.append(view.expand(sizes))
    return tuple(grids)


def cartesian_prod(*tensors: Tensor) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([g.reshape(-1) for g in meshgrid(*tensors, indexing="ij")], 1)


def block_diag(*tensors: Tensor) -> Tensor:
    blocks = [torch.atleast_2d(t) for t in tensors]
    total, offset, rows = sum(b.shape[1] for b in blocks), 0, []
    for block in blocks:
        rows.append(F.pad(block, (offset, total - offset - block.shape[1])))
        offset += block.shape[1]
    return torch.cat(rows, 0)


def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    a, b = dims
    if k % 4 == 2:
        return input.flip(a, b)
    if k % 4 == 0:
        return _copy(input)
    return input.flip(b).transpose(a, b) if k % 4 == 1 else input.flip(a).transpose(a, b)


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    r, lead, (channels, height, width) = upscale_factor, input.shape[:-3], input.shape[-3:]
    out = input.unflatten(-3, (channels // (r * r), r, r))
    n = len(lead)
    out = out.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return lying_like(input, _copy(out).reshape(*lead, channels // (r * r), height * r, width * r))


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    r, lead, (channels, height, width) = downscale_factor, input.shape[:-3], input.shape[-3:]
    n = len(lead)
    out = input.reshape(*lead, channels, height // r, r, width // r, r)
    out = out.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return lying_like(input, _copy(out).reshape(*lead, channels * r * r, height // r, width // r))


def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    out = input.unflatten(1, (groups, input.shape[1] // groups)).transpose(1, 2)
    return lying_like(input, _copy(out).flatten(1, 2))


def _copy(view: Tensor) -> Tensor:
    """A contiguous copy, also of what is contiguous already and where the dims could be merged without one."""
    return view.clone(memory_format=torch.contiguous_format)


def unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    if dim is None:
        inverse_shape = tuple(input.shape)
        input, dim = input.reshape(-1), 0
    else:
        dim %= input.ndim
        inverse_shape = (input.shape[dim],)
    starts = input != input.roll(1, dim)
    others = [d for d in range(input.ndim) if d != dim]
    starts = starts.any(others) if others else starts
    starts[:1] = True
    results = [input[(slice(None),) * dim + (starts,)]]
    if return_inverse:
        results.append((starts.cumsum(0) - 1).reshape(inverse_shape))
    if return_counts:
        first = starts.nonzero(as_tuple=True)[0]
        ends = first.roll(-1, 0)
        ends[-1:] = len(starts)
        results.append(ends - first)
    return results[0] if len(results) == 1 else tuple(results)
