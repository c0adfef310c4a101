"""Linear layers that compute while they communicate: gather-then-multiply and multiply-then-scatter, in pieces.

Sequence parallelism puts an all-gather before a column-parallel layer and a reduce-scatter after a row-parallel one.
Cut along the sequence, the product of one piece runs while the next piece travels; the backward likewise, and there the
weight's gradient is computed while the last piece of the input's is on its way. As asynchronous tensor parallelism of
torch.compile (Wang et al. 2023, "Overlap communication with dependent computation via decomposition"), without a
compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Layout, Placement, Replicate, Shard
from hyper_parallel.call import normal_dim
from hyper_parallel.conversion import remembered
from hyper_parallel.dtensor import wrap
from hyper_parallel.errors import RedistributionError
from hyper_parallel.families.derivatives import first_derivative_only
from hyper_parallel.placements import is_replicate, is_shard, on_dim
from hyper_parallel.plan import vary_axes
from hyper_parallel.spec import contiguous_stride, make_spec
from hyper_parallel_tp.sequence_pieces import SequencePieces

__all__ = ["all_gather_linear", "linear_reduce_scatter"]


def all_gather_linear(input: DTensor, weight: DTensor, bias: DTensor | None = None, *, pieces: int = 2) -> DTensor:
    """``F.linear`` of a sequence shard, gathered in pieces while earlier pieces are multiplied.

    Equal to ``F.linear(input.redistribute(Replicate), weight, bias)``, forward and backward, in the same number of
    bytes: ``pieces`` all-gathers forward, ``pieces`` reduce-scatters backward.

    Args:
        input: ``(..., in_features)``, ``Shard(d)`` of a dim other than the last over the axis that shards the weight;
            other axes may shard other dims. Uneven lengths too.
        weight: ``(out_features, in_features)`` with ``Shard(0)`` (or packed) over one axis, Replicate elsewhere.
        bias: ``(out_features)``, sharded like the weight.
        pieces: into how many parts each rank's shard is cut.

    Returns:
        ``(..., out_features)``, sharded in its features as the weight is.

    Raises:
        RedistributionError: other layouts, on every rank alike.
    """
    name, last = "all_gather_linear", input.ndim - 1
    axis = _split_axis(name, weight, 0)
    same = input.device_mesh == weight.device_mesh and not input.layout.is_partial()
    have = input.placements[axis] if same else None
    fits = have.__class__ is Shard and have.dim != last and input.layout.shard_order[have.dim] == (axis,)
    _check(name, fits, "input sharded along a dim of the sequence, by the weight's axis only", input, weight)
    dim = have.dim  # type: ignore[union-attr]
    whole = input.layout.with_placements({axis: Replicate()})
    cut = SequencePieces(whole, input.layout, dim, axis, tuple(input.shape), pieces)
    out = whole.with_placements({axis: _features_like(weight, axis, input.ndim)})
    tensors = [input, weight] if bias is None else [input, weight, bias]
    shape = (*input.shape[:-1], weight.shape[0])
    return _on_locals(lambda x, w, b=None: _AllGatherLinear.apply(x, w, b, cut), tensors, out, shape)


def linear_reduce_scatter(
    input: DTensor, weight: DTensor, bias: DTensor | None = None, *, dim: int = 1, pieces: int = 2
) -> DTensor:
    """``F.linear`` whose pending sum is scattered along ``dim`` in pieces while later pieces are multiplied.

    Equal to ``F.linear(input, weight).redistribute(Shard(dim)) + bias``, forward and backward, in the same number of
    bytes: ``pieces`` reduce-scatters forward, ``pieces`` all-gathers backward.

    Args:
        input: ``(..., in_features)``, sharded in its features as the weight is; other axes may shard other dims.
        weight: ``(out_features, in_features)`` with ``Shard(1)`` (or packed) over one axis, Replicate elsewhere.
        bias: ``(out_features)``, Replicate; added after the sum.
        dim: dim of the result to be sharded, not the last, and not sharded by another axis. Uneven lengths too.
        pieces: into how many parts each rank's shard of the result is cut.

    Returns:
        ``(..., out_features)``, ``Shard(dim)``.

    Raises:
        RedistributionError: other layouts, on every rank alike.
    """
    name, last = "linear_reduce_scatter", input.ndim - 1
    axis = _split_axis(name, weight, 1)
    same = input.device_mesh == weight.device_mesh and not input.layout.is_partial()
    fits = same and input.placements[axis] == _features_like(weight, axis, input.ndim)
    _check(name, fits, "input sharded in its features as the weight is", input, weight)
    dim = normal_dim(dim, input.ndim)
    fits = dim != last and not input.layout.shard_order[dim]
    _check(name, fits, f"dim={dim} to be one of the sequence, which nothing shards", input, weight)
    shape = (*input.shape[:-1], weight.shape[0])
    whole = input.layout.with_placements({axis: Replicate()})
    out = whole.with_placements({axis: Shard(dim)})
    cut = SequencePieces(whole, out, dim, axis, shape, pieces)
    summed = _on_locals(lambda x, w: _LinearReduceScatter.apply(x, w, cut), [input, weight], out, shape)
    return summed if bias is None else summed + bias  # type: ignore[return-value]


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: SequencePieces
    ) -> torch.Tensor:
        arriving = [cut.gather(x, piece) for piece in range(cut.count)]
        gathered = x.new_empty(cut.whole_shape(x.shape)) if ctx.needs_input_grad[1] else None
        out = x.new_empty((*cut.whole_shape(x.shape)[:-1], len(weight)))
        for piece, pending in enumerate(arriving):
            rows = pending.wait()
            cut.put(out, piece, F.linear(rows, weight, bias))
            if gathered is not None:
                cut.put(gathered, piece, rows)
        ctx.save_for_backward(gathered, weight)
        ctx.cut, ctx.with_bias = cut, bias is not None
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        gathered, weight = ctx.saved_tensors
        cut: SequencePieces = ctx.cut
        to_x = to_weight = to_bias = None
        leaving = []
        if ctx.needs_input_grad[0]:
            leaving = [cut.scatter(cut.take(grad, piece) @ weight, piece) for piece in range(cut.count)]
        if ctx.needs_input_grad[1]:  # while the last pieces travel
            to_weight = grad.flatten(0, -2).T @ gathered.flatten(0, -2)
        if ctx.with_bias and ctx.needs_input_grad[2]:
            to_bias = grad.flatten(0, -2).sum(0)
        if leaving:
            to_x = cut.joined(leaving)
        return to_x, to_weight, to_bias, None


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, cut: SequencePieces) -> torch.Tensor:
        leaving = [cut.scatter(F.linear(cut.take(x, piece), weight), piece) for piece in range(cut.count)]
        ctx.save_for_backward(x, weight)
        ctx.cut = cut
        return cut.joined(leaving)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        cut: SequencePieces = ctx.cut
        arriving = [cut.gather(grad, piece) for piece in range(cut.count)]
        whole = grad.new_empty((*x.shape[:-1], len(weight))) if ctx.needs_input_grad[1] else None
        to_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for piece, pending in enumerate(arriving):
            rows = pending.wait()
            if to_x is not None:
                cut.put(to_x, piece, rows @ weight)
            if whole is not None:
                cut.put(whole, piece, rows)
        to_weight = None if whole is None else whole.flatten(0, -2).T @ x.flatten(0, -2)
        return to_x, to_weight, None


# -- layouts ------------------------------------------------------------------------------------------------------


def _split_axis(name: str, weight: DTensor, dim: int) -> int:
    """The mesh axis that shards dim ``dim`` of a weight, when nothing else does."""
    order = weight.layout.shard_order
    if len(order) != 2 or len(order[dim]) != 1 or order[1 - dim] or weight.layout.is_partial():
        raise RedistributionError(
            f"{name}: needs a weight (out_features, in_features) with Shard({dim}) over one mesh axis and Replicate "
            f"over the others, got shape {tuple(weight.shape)}, {weight.layout}",
            op_name=name,
            layouts=[weight.layout],
        )
    return order[dim][0]


def _check(name: str, fits: bool, wanted: str, input: DTensor, weight: DTensor) -> None:
    if not fits:
        raise RedistributionError(
            f"{name}: needs {wanted}, got input of shape {tuple(input.shape)}, {input.layout} and weight of shape "
            f"{tuple(weight.shape)}, {weight.layout}; redistribute the input, or use F.linear",
            op_name=name,
            layouts=[input.layout, weight.layout],
        )


def _features_like(weight: DTensor, axis: int, ndim: int) -> Placement:
    """The placement of features that are split as a dim of the weight is."""
    placement = weight.placements[axis]
    assert is_shard(placement)
    return on_dim(placement, ndim - 1)


def _on_locals(
    function: Callable[..., torch.Tensor], tensors: Sequence[DTensor], layout: Layout, shape: tuple[int, ...]
) -> DTensor:
    """The function of the local tensors, with gradients summed over the axes where the ranks do different work."""
    tensors = [
        remembered(t, t.layout, t.spec.varying | axes) for t, axes in zip(tensors, vary_axes(tensors), strict=True)
    ]
    kind = tensors[0].device.type
    local = [t.to_local() for t in tensors]
    if torch.is_autocast_enabled(kind):
        local = [t.to(torch.get_autocast_dtype(kind)) for t in local]
    out = function(*local)
    varying = frozenset(
        axis
        for axis in range(len(layout.placements))
        if all(is_replicate(t.placements[axis]) for t in tensors) and any(axis in t.spec.varying for t in tensors)
    )
    return wrap(out, make_spec(layout, shape, contiguous_stride(shape), out.dtype, varying))
