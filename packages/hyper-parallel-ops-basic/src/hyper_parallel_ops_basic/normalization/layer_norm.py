"""layer_norm and rms_norm. Sharded normalised dims cost all-reduces of one or two numbers per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, PackedShard, Placement, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, OverAxes, S, first_derivative_only, global_indices, kept, wide
from hyper_parallel_ops_basic.values.autocast import widened


class RowNorm(StrategyOp):
    """Normalisation over the last dims, then a weight (and bias) of their shape.

    The other dims may be sharded freely; a Replicate weight is then varying, as the engine sees to. Normalised dims are
    sharded together with the weight; see the subclasses for what that costs.

    Attributes:
        tensors: names of the inputs of the normalised shape, laid out alike.
        affine: names of the weight and bias.
    """

    tensors: Sequence[str] = ("input",)
    affine: Sequence[str] = ("weight", "bias")

    def rank(self, call: Call) -> int:
        """How many dims are normalised."""
        shape = call.arg("normalized_shape")
        return 1 if isinstance(shape, int) else len(shape)

    def output_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        shape, given = tuple(call.spec("input").shape), call.arg("normalized_shape")
        fits = shape[len(shape) - self.rank(call) :] == ((given,) if isinstance(given, int) else tuple(given))
        return [shape] if fits else None

    def strategies(self, call: Call) -> Iterable[Strategy]:
        shape = tuple(call.spec(self.tensors[0]).shape)
        first = len(shape) - self.rank(call)
        affine = [name for name in self.affine if call.index(name) is not None]
        for name in affine:
            given = tuple(call.spec(name).shape)
            if given != shape[first:]:
                raise RuntimeError(f"{call.name}: expected {name} of the normalised shape {shape[first:]}, got {given}")
        for d in range(len(shape)):
            together = dict.fromkeys(self.tensors, S(d)) | (dict.fromkeys(affine, S(d - first)) if d >= first else {})
            yield Strategy(together, self.outputs(d, first))

    def outputs(self, d: int, first: int) -> Placement | Sequence[Placement]:
        """Placements of the outputs when dim ``d`` is sharded; those from ``first`` on are normalised."""
        return S(d)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        at = call.position(self.tensors[0])
        ndim = len(call.inputs[at].shape)
        dims = tuple(range(ndim - self.rank(call), ndim))
        over = OverAxes(targets[at], dims)
        if not over:
            return None
        count = math.prod(call.inputs[at].shape[d] for d in dims)
        arguments, compute = self.arguments, self.compute

        def local(*args: Any, **kwargs: Any) -> Any:
            given = arguments.bind(args, kwargs)
            return compute(given, over, dims, count)

        return local

    def compute(self, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int) -> Any:
        """The result from the local arguments by name; ``over`` shards some of ``dims`` (``count`` elements)."""
        raise NotImplementedError


class LayerNorm(RowNorm):
    """``layer_norm``: over sharded dims two all-reduces forward (sum; squared distances) and one backward."""

    summary = OpSummary(
        "every dim; normalised ones with the weight",
        communicates="sharded normalised dim: 2 all-reduces of one number per row | 1 of two",
    )

    signature = "input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True"

    def compute(self, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int) -> torch.Tensor:
        x, weight, bias = widened(given["input"]), given.get("weight"), given.get("bias")
        out, _ = Normalise.apply(wide(x), over, dims, count, given.get("eps", 1e-5), True)
        if weight is not None:
            out = out * weight
        return (out if bias is None else out + bias).to(x.dtype)


class RMSNorm(RowNorm):
    """``rms_norm``: over sharded dims one all-reduce forward and one backward."""

    summary = OpSummary(
        "every dim; normalised ones with the weight",
        communicates="sharded normalised dim: 1 all-reduce of one number per row | 1",
    )

    signature = "input, normalized_shape, weight=None, eps=None"

    def compute(self, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int) -> torch.Tensor:
        x, weight, eps = given["input"], given.get("weight"), given.get("eps")
        x_wide = wide(x)
        # PyTorch's default is the epsilon of the dtype in which it computes.
        eps = torch.finfo(x_wide.dtype).eps if eps is None else eps
        out, _ = Normalise.apply(x_wide, over, dims, count, eps, False)
        return (out if weight is None else out * weight).to(x.dtype)


class Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(mean of squares + eps)`` over sharded dims, and what it was multiplied with.

    ``centred``: whether the mean is taken off.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, over: OverAxes, dims: tuple[int, ...], count: int, eps: float, centred: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if centred:
            x = x - over.sum(x.sum(dims, keepdim=True)) / count
        scale = (over.sum(x.square().sum(dims, keepdim=True)) / count + eps).rsqrt()
        out = x * scale
        ctx.save_for_backward(kept(out), scale)
        ctx.args = (over, dims, count, centred)
        ctx.mark_non_differentiable(scale)
        return out, scale

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        out, scale = (saved.conj() for saved in ctx.saved_tensors)
        over, dims, count, centred = ctx.args
        terms = [(grad * out).sum(dims, keepdim=True)]
        if centred:
            terms.append(grad.sum(dims, keepdim=True))
        means = over.sum(torch.stack(terms)) / count
        found = grad - out * means[0]
        if centred:
            found = found - means[1]
        return found * scale, None, None, None, None, None


class GroupNorm(StrategyOp):
    """``group_norm``: samples, channels and positions sharded.

    Nothing is communicated where every rank has whole groups; else two all-reduces of one number per sample and group
    forward, and two backward.
    """

    summary = OpSummary(
        "every dim, channels with the weight",
        communicates="channels that split a group, or positions: 2 all-reduces of one number per sample and group | 2",
    )
    signature = "input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True"

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        return [tuple(call.spec("input").shape)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield Strategy({"input": S(0)}, S(0))
        yield Strategy({"input": S(1), "weight": S(0), "bias": S(0)}, S(1))
        for d in range(2, len(call.spec("input").shape)):
            yield Strategy({"input": S(d)}, S(d))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        layout, shape = targets[call.index("input") or 0], tuple(call.spec("input").shape)
        groups, arguments = int(call.arg("num_groups")), self.arguments
        axes = layout.shard_order[1]
        ways = math.prod(layout.mesh_shape[a] for a in axes)
        packed = any(isinstance(layout.placements[a], PackedShard) for a in axes)
        split = bool(axes) and (packed or groups % ways != 0)
        over = OverAxes(layout, [*([1] if split else []), *range(2, len(shape))])

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            x, weight, bias, eps = given["input"], given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
            if not over:
                # torch.group_norm: the functional form checks sizes, which are those of a piece here.
                return torch.group_norm(x, groups if split else groups // ways, weight, bias, eps)
            members = global_indices(layout, shape, 1, x.device) // (shape[1] // groups)
            return _by_groups(x, weight, bias, eps, over, members, (groups, math.prod(shape[1:]) // groups))

        return local


def _by_groups(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    over: OverAxes,
    members: torch.Tensor,
    sizes: tuple[int, int],
) -> torch.Tensor:
    """Group normalisation of a piece.

    Args:
        over: the axes that share groups out.
        members: the group of each of this rank's channels.
        sizes: number of groups, and of elements in one.
    """
    groups, count = sizes

    def spread(per_channel: torch.Tensor) -> torch.Tensor:
        return per_channel.reshape(*per_channel.shape, *[1] * (x.ndim - 2))

    def mean(t: torch.Tensor) -> torch.Tensor:
        """Of each channel's group."""
        sums = t.sum(tuple(range(2, t.ndim))) if t.ndim > 2 else t
        totals = over.sum(sums.new_zeros(len(sums), groups).index_add(1, members, sums), varying=True)
        return spread(totals.index_select(1, members) / count)

    x_wide = wide(x)
    centred = x_wide - mean(x_wide)
    out = centred * (mean(centred.square()) + eps).rsqrt()
    if weight is not None:
        out = out * spread(weight)
    return (out if bias is None else out + spread(bias)).to(x.dtype)
