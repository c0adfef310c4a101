"""Linear layers that compute while they communicate: gather-then-multiply and multiply-then-scatter, in pieces.

Sequence parallelism puts an all-gather before a column-parallel layer and a reduce-scatter after a row-parallel one.
Cut along the sequence, the product of one piece runs while the next piece travels; the backward likewise, and there the
weight's gradient is computed while the last piece of the input's is on its way. As asynchronous tensor parallelism of
torch.compile (Wang et al. 2023, "Overlap communication with dependent computation via decomposition"), without a
compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel import DTensor, Layout, Placement, Replicate, Shard
from hyper_parallel.errors import RedistributionError
from hyper_parallel.rules import (
    contiguous_stride,
    first_derivative_only,
    is_replicate,
    is_shard,
    local_of,
    make_spec,
    normal_dim,
    on_dim,
    remembered,
    target_spec,
    torch_compat,
    vary_axes,
    wrap,
)
from hyper_parallel_tp.overlap.sequence_pieces import SequencePieces

__all__ = ["all_gather_linear", "linear_reduce_scatter"]


def all_gather_linear(input: DTensor, weight: DTensor, bias: DTensor | None = None, *, pieces: int = 2) -> DTensor:
    """``F.linear`` of a sequence shard, gathered in pieces while earlier pieces are multiplied.

    Equal to ``F.linear(input.redistribute(Replicate), weight, bias)``, forward and backward, in the same number of
    bytes: ``pieces`` all-gathers forward, ``pieces`` reduce-scatters backward. What arrived is remembered: of layers
    that share an input (q, k and v; gate and up) the first gathers it, and the first scatters the sum of all their
    gradients; under autocast in the dtype that it computes in.

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
    known = _gathered.get(input)
    if known is not None and known.is_current(input, whole):
        return F.linear(known.tensor, weight, bias)  # type: ignore[return-value]
    typed, (x, w, *b) = _locals(tensors)
    known = _Gathered(input)
    product, gathered = _AllGatherLinear.apply(x, w, b[0] if b else None, cut, known.graph)
    if not gathered.is_inference():
        spec = target_spec(input.spec, whole, input.spec.varying | {axis})
        known.tensor = wrap(gathered, spec.replace(dtype=gathered.dtype))
        _gathered[input] = known
    return _wrapped(product, typed, out)


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
    whole = input.layout.with_placements({axis: Replicate()})
    out = whole.with_placements({axis: Shard(dim)})
    cut = SequencePieces(whole, out, dim, axis, (*input.shape[:-1], weight.shape[0]), pieces)
    typed, (x, w) = _locals([input, weight])
    summed = _wrapped(_LinearReduceScatter.apply(x, w, cut), typed, out)
    return summed if bias is None else summed + bias  # type: ignore[return-value]


class _Graph:
    """Whether a backward went through a graph, which freed what it had kept."""

    spent = False


class _Gathered:
    """What one layer gathered of its input, for the others that share it."""

    tensor: DTensor

    def __init__(self, input: DTensor) -> None:
        self.made = self._circumstances(input)
        self.graph = _Graph()

    def is_current(self, input: DTensor, whole: Layout) -> bool:
        """Whether a layer may use it: nothing was written, and it is the same forward, or the same recomputation."""
        return not self.graph.spent and self.tensor.layout is whole and self.made == self._circumstances(input)

    @staticmethod
    def _circumstances(input: DTensor) -> tuple[Any, ...] | None:
        local = local_of(input)
        if local.is_inference():
            return None
        mode = torch.is_grad_enabled(), _cast_to(input), torch_compat.current_task()
        return local._version, local.requires_grad, *mode


_gathered: Any = WeakTensorKeyDictionary()


class _AllGatherLinear(torch.autograd.Function):
    """The product, and what was gathered for it, which other products may use."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cut: SequencePieces,
        graph: _Graph,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arriving = [cut.gather(x, piece) for piece in range(cut.count)]
        gathered = x.new_empty(cut.whole_shape(x.shape))
        out = x.new_empty((*gathered.shape[:-1], len(weight)))
        for piece, pending in enumerate(arriving):
            rows = pending.wait()
            cut.put(out, piece, F.linear(rows, weight, bias))
            cut.put(gathered, piece, rows)
        ctx.save_for_backward(gathered if ctx.needs_input_grad[1] else None, weight)
        ctx.cut, ctx.graph, ctx.with_bias = cut, graph, bias is not None
        ctx.set_materialize_grads(False)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(gathered)
        return out, gathered

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor | None, to_gathered: torch.Tensor | None) -> tuple[Any, ...]:
        gathered, weight = ctx.saved_tensors
        ctx.graph.spent = True
        cut: SequencePieces = ctx.cut
        to_x = to_weight = to_bias = None
        leaving = []
        if ctx.needs_input_grad[0]:
            for piece in range(cut.count):
                terms = [] if grad is None else [cut.take(grad, piece) @ weight]
                terms += [] if to_gathered is None else [cut.take(to_gathered, piece)]
                leaving.append(cut.scatter(terms[0] if len(terms) == 1 else terms[0].add_(terms[1]), piece))
        if ctx.needs_input_grad[1] and grad is not None:  # while the last pieces travel
            to_weight = grad.flatten(0, -2).T @ gathered.flatten(0, -2)
        if ctx.with_bias and ctx.needs_input_grad[2] and grad is not None:
            to_bias = grad.flatten(0, -2).sum(0)
        if leaving:
            to_x = cut.joined(leaving)
        return to_x, to_weight, to_bias, None, None


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


def _cast_to(tensor: DTensor) -> torch.dtype | None:
    """The dtype that autocast computes in, when it is another than the tensor's; it leaves float64 alone."""
    kind = tensor.device.type
    if tensor.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return None if dtype is tensor.dtype else dtype


def _locals(tensors: Sequence[DTensor]) -> tuple[list[DTensor], list[torch.Tensor]]:
    """The tensors with gradients summed over the axes where the ranks do different work, and their local tensors in the
    dtype of the product."""
    typed = [
        remembered(t, t.layout, t.spec.varying | axes) for t, axes in zip(tensors, vary_axes(tensors), strict=True)
    ]
    local = [local_of(t) for t in typed]
    return typed, [t if (dtype := _cast_to(d)) is None else t.to(dtype) for t, d in zip(local, typed, strict=True)]


def _wrapped(out: torch.Tensor, tensors: Sequence[DTensor], layout: Layout) -> DTensor:
    """This rank's part of the product of input and weight."""
    shape = (*tensors[0].shape[:-1], tensors[1].shape[0])
    varying = frozenset(
        axis
        for axis in range(len(layout.placements))
        if all(is_replicate(t.placements[axis]) for t in tensors) and any(axis in t.spec.varying for t in tensors)
    )
    return wrap(out, make_spec(layout, shape, contiguous_stride(shape), out.dtype, varying))
