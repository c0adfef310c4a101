"""layer_norm and rms_norm. Sharded normalised dims cost all-reduces of one or two numbers per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.call import Call
from hyper_parallel.families.derivatives import first_derivative_only
from hyper_parallel.families.over_axes import OverAxes
from hyper_parallel.layout import Layout
from hyper_parallel.placements import PackedShard, Placement
from hyper_parallel.strategy import S, Strategy, StrategyOp

from .autocast import widened


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
        parsed, compute = self._parsed, self.compute

        def local(*args: Any, **kwargs: Any) -> Any:
            given = parsed.bind(args, kwargs)  # type: ignore[union-attr]
            return compute(given, over, dims, count)

        return local

    def compute(self, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int) -> Any:
        """The result from the local arguments by name; ``over`` shards some of ``dims`` (``count`` elements)."""
        raise NotImplementedError


class LayerNorm(RowNorm):
    """``layer_norm``: over sharded dims two all-reduces forward (sum; squared distances) and one backward."""

    signature = "input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True"

    def compute(self, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int) -> torch.Tensor:
        x, weight, bias = widened(given["input"]), given.get("weight"), given.get("bias")
        out, _ = Normalise.apply(_wide(x), over, dims, count, given.get("eps", 1e-5), True)
        if weight is not None:
            out = out * weight
        return (out if bias is None else out + bias).to(x.dtype)


class RMSNorm(RowNorm):
    """``rms_norm``: over sharded dims one all-reduce forward and one backward."""

    signature = "input, normalized_shape, weight=None, eps=None"

    def compute(self, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int) -> torch.Tensor:
        x, weight, eps = given["input"], given.get("weight"), given.get("eps")
        wide = _wide(x)
        # PyTorch's default is the epsilon of the dtype in which it computes.
        out, _ = Normalise.apply(wide, over, dims, count, torch.finfo(wide.dtype).eps if eps is None else eps, False)
        return (out if weight is None else out * weight).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


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
        ctx.save_for_backward(out, scale)
        ctx.args = (over, dims, count, centred)
        ctx.mark_non_differentiable(scale)
        return out, scale

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        out, scale = ctx.saved_tensors
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
    """``group_norm``: sharded samples, or channels where every rank gets whole groups."""

    signature = "input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True"

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        return [tuple(call.spec("input").shape)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield Strategy({"input": S(0)}, S(0))
        axes = set(call.spec("input").layout.shard_order[1])
        for name in ("weight", "bias"):
            if call.index(name) is not None:
                axes.update(call.spec(name).layout.shard_order[0])
        packed = any(isinstance(spec.layout.placements[a], PackedShard) for spec in call.inputs for a in axes)
        if not packed and call.arg("num_groups") % math.prod(call.info.shape[a] for a in axes) == 0:
            yield Strategy({"input": S(1), "weight": S(0), "bias": S(0)}, S(1))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        layout = targets[call.index("input") or 0]
        groups = call.arg("num_groups") // math.prod(layout.mesh_shape[a] for a in layout.shard_order[1])
        parsed = self._parsed

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            # torch.group_norm: the functional form checks sizes, which are those of a piece here.
            given = parsed.bind(args, kwargs)  # type: ignore[union-attr]
            return torch.group_norm(
                given["input"], groups, given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
            )

        return local
