"""Two tensors that are sharded alike, gathered in one buffer; only the gradient of one of them is sent back."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel import DTensor, Replicate
from hyper_parallel.rules import contiguous_stride, is_replicate, local_of, make_spec, move_of, moved, remembered, wrap

__all__ = ["gather_together"]


def gather_together(kept: DTensor, free: DTensor | None, axis: str) -> tuple[DTensor, Any]:
    """Make two tensors Replicate over a mesh axis in one collective, for uses in which ranks do different work.

    Args:
        kept: a tensor that may need a gradient. It is expected in terms, and the sum of these is one reduce-scatter.
        free: a tensor that needs none, if there is one; dtype, layout and shape as those of ``kept``, but for the
            length of the last dim, along which neither is sharded.
        axis: name of the mesh axis.

    Returns:
        Both, whole along that axis.
    """
    before, index = kept.layout, kept.layout.info.axis(axis)
    after = before.with_placements({index: Replicate()})
    varying = kept.spec.varying | {index}
    if free is None or is_replicate(before.placements[index]):
        return remembered(kept, after, varying), free
    other = kept.spec.varying
    both = move_of((before, other), (after, other), (*kept.shape[:-1], kept.shape[-1] + free.shape[-1]))
    own = move_of((before, other), (after, varying), tuple(kept.shape))
    locals_ = _Together.apply(local_of(kept), local_of(free), both, own)
    first, second = (
        wrap(local, make_spec(after, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype, axes))
        for local, tensor, axes in zip(locals_, (kept, free), (varying, other), strict=True)
    )
    return first, second


class _Together(torch.autograd.Function):
    """One move of two tensors, and that of the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, kept: torch.Tensor, free: torch.Tensor, both: Any, own: Any) -> Any:
        ctx.own = own
        whole = moved(torch.cat([kept, free], dim=-1), both)
        first, second = (part.contiguous() for part in whole.split([kept.shape[-1], free.shape[-1]], dim=-1))
        ctx.mark_non_differentiable(second)
        return first, second

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        return moved(grad, ctx.own.back), None, None, None
