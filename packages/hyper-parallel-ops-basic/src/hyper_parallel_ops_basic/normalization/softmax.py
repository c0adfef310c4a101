"""softmax, log_softmax and logsumexp; over a sharded dim by two small all-reduces, the maximum and the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import LOW, Call, OpSummary, OverAxes, Reduction, S, normal_dim
from hyper_parallel_ops_basic.indexing.lookup import known_sums
from hyper_parallel_ops_basic.reduction.min_max import local_extreme
from hyper_parallel_ops_basic.values.autocast import widened


class Softmax(StrategyOp):
    """``softmax`` and ``log_softmax`` (every form), ``softmin``.

    A sharded ``dim``: the maximum and the sum of exponentials are all-reduced forward (of one element per row), and one
    sum backward, unless who made the gradient knows it (:mod:`hyper_parallel_ops_basic.indexing.lookup`).

    Args:
        log: whether the logarithm is returned.
        sign: -1 for ``softmin``.
    """

    summary = OpSummary(
        "every dim",
        communicates=(
            "sharded dim: 2 all-reduces of one number per row | 1 (none where the result of `log_softmax` goes into "
            "`nll_loss` or `gather`)"
        ),
    )

    signature = "input, dim, _stacklevel, dtype"

    def __init__(self, op_name: str, *, log: bool = False, sign: int = 1) -> None:
        super().__init__(op_name)
        self.log, self.sign = log, sign

    def dim_of(self, call: Call) -> int:
        """The normalised dim; without one, PyTorch's old implicit choice."""
        ndim = len(call.inputs[0].shape)
        given = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
        if given is None:
            return 0 if ndim in (0, 1, 3) else 1
        return normal_dim(given, ndim)

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        return [tuple(call.inputs[0].shape)]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        self.dim_of(call)  # raises when it is out of range
        return (Strategy([S(d)], S(d)) for d in range(len(call.inputs[0].shape)))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dim = self.dim_of(call)
        over = OverAxes(targets[0], [dim] if targets[0].ndim else [])
        if not over:
            return None
        # F.softmax(x, dim, _stacklevel, dtype) and torch.softmax(x, dim, dtype) differ in their order.
        dtype = next((a for a in (*call.args, *call.kwargs.values()) if isinstance(a, torch.dtype)), None)
        kind, sign = _LogSoftmax if self.log else _SoftmaxOverAxes, self.sign

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            x = widened(x) if dtype is None else x.to(dtype)
            return kind.apply(x if sign > 0 else -x, over, dim)

        return local


def shifted(
    x: torch.Tensor, over: OverAxes, dim: int | tuple[int, ...], *, finite: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` in at least float32 less the maximum over the ranks (of complex numbers' real parts), and that maximum.

    Args:
        finite: take 0 for an infinite maximum. Otherwise what has one is NaN, as a softmax of it is.
    """
    dims = (dim,) if isinstance(dim, int) else dim
    top = over.extreme(local_extreme(x.real, dims, True, "max"), "max")
    if finite:
        top = torch.where(top.isinf(), 0, top)
    if x.dtype in LOW:
        top = top.float()
        return x.float().sub_(top), top
    return x - top, top


def softmax_over(x: torch.Tensor, over: OverAxes, dim: int) -> torch.Tensor:
    """``x.softmax(dim)``, of which ``over`` are the mesh axes that shard that dim."""
    return _SoftmaxOverAxes.apply(x, over, dim) if over else x.softmax(dim)


class _SoftmaxOverAxes(torch.autograd.Function):
    """``softmax`` along a sharded dim; keeps only the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, over: OverAxes, dim: int) -> torch.Tensor:
        terms = shifted(x, over, dim)[0].exp_()
        out = terms.div_(over.sum(terms.sum(dim, keepdim=True))).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.args = (over, dim)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (out,) = ctx.saved_tensors
        over, dim = ctx.args
        inner = over.sum((grad * out).sum(dim, keepdim=True), varying=True)
        return out * (grad - inner), None, None


class _LogSoftmax(torch.autograd.Function):
    """``log_softmax`` along a sharded dim; keeps only the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, over: OverAxes, dim: int) -> torch.Tensor:
        lower = shifted(x, over, dim)[0]
        out = (lower - over.sum(lower.exp().sum(dim, keepdim=True)).log_()).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.args = (over, dim)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (out,) = ctx.saved_tensors
        over, dim = ctx.args
        sums = known_sums(grad, over.layout, dim)
        if sums is None:
            sums = over.sum(grad.sum(dim, keepdim=True), varying=True)
        return grad - out.exp() * sums, None, None


class LogSumExp(Reduction):
    """``logsumexp``: two small all-reduces over sharded dims, none backward."""

    summary = OpSummary(
        "every dim",
        communicates="sharded folded dim: 2 all-reduces | none",
    )

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        over = self.over(call, targets)
        if not over:
            return None
        dims, keep = self.folded(call), self.keepdim(call)

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            x = widened(x)
            if not (x.is_floating_point() or x.is_complex()):
                x = x.to(torch.get_default_dtype())
            lower, top = shifted(x, over, dims, finite=True)
            total = over.sum(lower.exp().sum(dims, keepdim=True)).log() + top.detach()
            return (total if keep else total.squeeze(dims)).to(x.dtype)

        return local
