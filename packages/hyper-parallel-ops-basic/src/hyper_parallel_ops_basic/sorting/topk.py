"""topk along a sharded dim: the candidates of every rank, then the best among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy
from hyper_parallel.rules import Call, OpSummary, OverAxes, R, S, global_indices, normal_dim
from hyper_parallel_ops_basic.sorting.sort import AlongDim


class TopK(AlongDim):
    """``topk(input, k, dim, largest, sorted)``.

    Over a sharded dim one all-gather of ``k`` candidates per rank, with their global indices, and none backward; the
    result is sorted whatever ``sorted`` says. (Fewer bytes than whole lines, as ``k`` is small.)
    """

    summary = OpSummary(
        "every dim",
        communicates="sharded dim: 1 all-gather of k candidates per rank | none",
    )

    def __init__(self, op_name: str) -> None:
        super().__init__(op_name, signature="input, k, dim=-1, largest=True, sorted=True", outputs=2)

    def strategies(self, call: Call) -> Iterable[Strategy]:
        (dim,) = self.whole_dims(call)
        ndim = len(call.inputs[0].shape)
        yield from (Strategy([S(d)], S(d)) for d in range(ndim) if d != dim)
        if ndim:
            yield Strategy([S(dim)], R)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        shape = tuple(call.inputs[0].shape)
        dim = normal_dim(call.arg("dim", -1), len(shape))
        over = OverAxes(targets[0], [dim] if shape else [])
        if not over:
            return None
        k, largest = call.arg("k"), bool(call.arg("largest", True))
        return lambda x, *args, **kwargs: torch.return_types.topk(_ShardedTopK.apply(x, over, shape, dim, k, largest))


class _ShardedTopK(torch.autograd.Function):
    """Values and global indices of the ``k`` extremes along a sharded dim, which is last inside."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, over: OverAxes, shape: tuple[int, ...], dim: int, k: int, largest: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.movedim(dim, -1)
        here = min(k, rows.shape[-1])
        values, places = rows.topk(here, -1, largest)
        # One buffer of bits: the values, their indices, and -1 as the index where a rank has fewer than k.
        candidates = torch.full((2, *rows.shape[:-1], k), -1, dtype=torch.int64, device=x.device)
        candidates[0, ..., :here] = _bits(values)
        candidates[1, ..., :here] = global_indices(over.layout, shape, dim, x.device)[places]
        bits, indices = over.gather(candidates).movedim(0, -2).flatten(-2)
        values = _from_bits(bits, x.dtype)
        best = _ranked(values, indices < 0, largest)[..., :k]
        values, indices = values.gather(-1, best).movedim(-1, dim), indices.gather(-1, best).movedim(-1, dim)
        values, indices = values.detach(), indices.detach()  # as a view that a Function returns cannot be written to
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.args = (over, shape, dim)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        over, shape, dim = ctx.args
        mine = global_indices(over.layout, shape, dim, grad.device)
        # Position of each chosen element in this rank's piece; those of other ranks go to one place behind the end.
        place = torch.searchsorted(mine, indices.contiguous())
        found = place.clamp(max=max(len(mine) - 1, 0))
        here = (mine[found] == indices) if len(mine) else torch.zeros_like(indices, dtype=torch.bool)
        sizes = list(grad.shape)
        sizes[dim] = len(mine) + 1
        out = grad.new_zeros(sizes).scatter_add(dim, torch.where(here, found, len(mine)), over.vary(grad))
        return out.narrow(dim, 0, len(mine)), None, None, None, None, None


def _ranked(values: torch.Tensor, missing: torch.Tensor, largest: bool) -> torch.Tensor:
    """Positions from best to worst, missing ones last."""
    by_value = values.argsort(stable=True, dim=-1, descending=largest)
    return by_value.gather(-1, missing.gather(-1, by_value).to(torch.int8).argsort(stable=True, dim=-1))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.double().view(torch.int64) if values.is_floating_point() else values.to(torch.int64)


def _from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.contiguous().view(torch.float64).to(dtype) if dtype.is_floating_point else bits.to(dtype)
