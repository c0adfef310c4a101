"""Norms of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Partial, Placement, Replicate, Strategy
from hyper_parallel.rules import Call, Dealt, OpSummary, OverAxes, Reduction, S, norm_op, normal_dim, wide
from hyper_parallel_ops_basic.reduction.min_max import local_extreme, tie_share, unfold
from hyper_parallel_ops_basic.values.autocast import widened

# Parameters of the two functions, and the name of the one that is the order.
_FORMS = {
    "vector": ("x, ord=2, dim=None, keepdim=False, *, dtype=None", "ord"),
    "torch": ("input, p=fro, dim=None, keepdim=False, out=None, dtype=None", "p"),
}


class VectorNorm(Reduction):
    """``linalg.vector_norm``, and ``torch.norm``, whose nuclear norm deals out whole matrices to the ranks.

    Without a gradient the ranks' norms stay pending (a p-norm of p-norms is one), so that gradient clipping, which
    takes the norm of many tensors' norms, costs one all-reduce for all. With a gradient it is reduced inside: one
    all-reduce, none backward (order inf: the number of ties).

    Args:
        form: ``"vector"`` or ``"torch"``: whose arguments it has.
    """

    summary = OpSummary(
        "every dim; a folded one leaves a pending norm",
        pending="passes where its order is the same",
        communicates="none; where a gradient is needed, or the order is negative, 1 all-reduce | none (order inf: 1); "
        "order nuc: 1 all-to-all of whole matrices, dealt out to the ranks, 1 all-gather of the results | 1 all-to-all",
    )

    floats_matter = True

    def __init__(self, op_name: str, *, form: str = "vector") -> None:
        self.signature, self._order = _FORMS[form]
        self.form = form
        super().__init__(op_name)

    def order(self, call: Call) -> float:
        """The order p."""
        given = call.arg(self._order)
        return 2.0 if given is None or given == "fro" else float(given)

    def strategies(self, call: Call) -> Iterable[Strategy]:
        if not self._is_matrix_norm(call):
            yield from super().strategies(call)
            return
        ndim = len(call.inputs[0].shape)
        matrix = self._matrix(call)
        for d in range(ndim):
            gone = 0 if self.keepdim(call) else sum(m < d for m in matrix)
            yield Strategy([S(d)], Replicate() if d in matrix else S(d - gone))

    @staticmethod
    def _matrix(call: Call) -> list[int]:
        """The dims of the matrices, ascending."""
        ndim = len(call.inputs[0].shape)
        return sorted(normal_dim(d, ndim) for d in call.arg("dim") or range(ndim))

    def _is_matrix_norm(self, call: Call) -> bool:
        return call.arg(self._order) == "nuc"

    def pending(self, call: Call) -> Iterable[Strategy]:
        p = self.order(call)
        if 0 < p < math.inf and not call.needs_grad[0]:
            kind = Partial(norm_op(p))
            yield Strategy([kind], kind)

    def folded_output(self, call: Call) -> Placement:
        p = self.order(call)
        if call.needs_grad[0]:
            return Replicate()
        if math.isinf(p):
            return Partial("max" if p > 0 else "min")
        return Partial(norm_op(p)) if p > 0 else Partial() if p == 0 else Replicate()

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if self._is_matrix_norm(call):
            return self._of_whole_matrices(call, targets[0])
        over = self.over(call, targets)
        if not over:
            return None
        p, dims, keep, dtype = self.order(call), self.folded(call), self.keepdim(call), call.arg("dtype")
        inside = call.needs_grad[0] or (p < 0 and not math.isinf(p))

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            x = widened(x) if dtype is None else x.to(dtype)
            if inside:
                return _Norm.apply(x, over, p, dims, keep)
            return local_norm(x, p, dims, keep)

        return local

    def _of_whole_matrices(self, call: Call, layout: Layout) -> Callable[..., Any] | None:
        dealt = Dealt(layout, tuple(call.inputs[0].shape), self._matrix(call))
        keep, dtype = self.keepdim(call), call.arg("dtype")
        if not dealt:
            return None

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return dealt.gathered(torch.linalg.matrix_norm(dealt.lines(x), "nuc", dtype=dtype), keep)

        return local


def local_norm(x: torch.Tensor, p: float, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """This rank's norm; the neutral element where it holds nothing."""
    if math.isinf(p):
        return local_extreme(x.abs(), dims, keepdim, "max" if p > 0 else "min")
    return torch.linalg.vector_norm(x, p, dims, keepdim)


class _Norm(torch.autograd.Function):
    """The norm over sharded dims. Subgradients are PyTorch's: 0 where it is 0, shared among ties for order inf."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, over: OverAxes, p: float, dims: tuple[int, ...], keepdim: bool
    ) -> torch.Tensor:
        mine = local_norm(x, p, dims, keepdim) if p >= 0 or math.isinf(p) else x.abs().pow(p).sum(dims, keepdim)
        if p < 0 and not math.isinf(p):
            out = over.sum(mine).pow(1 / p)
        elif math.isinf(p):
            out = over.extreme(mine, "max" if p > 0 else "min")
        elif p == 0:
            out = over.sum(mine)
        else:
            out = over.sum(wide(mine).pow(p)).pow(1 / p).to(mine.dtype)
        ctx.save_for_backward(x, out)
        ctx.args = (over, p, dims, keepdim)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, out = ctx.saved_tensors
        over, p, dims, keepdim = ctx.args
        g, norm = over.vary(unfold(grad, dims, keepdim)), over.vary(unfold(out, dims, keepdim))
        zero = norm == 0
        if p == 0:
            found = torch.zeros_like(x)
        elif math.isinf(p):
            found = x.sgn() * tie_share(x.abs(), norm, over, dims) * g
        elif p == 1:
            found = x.sgn() * g
        elif p == 2:
            found = x * (g / norm).masked_fill(zero, 0)
        else:
            power = x.abs().pow(p - 1) if p > 1 else x.abs().pow(p - 1).masked_fill(x == 0, 0)
            found = x.sgn() * power * (g / norm.pow(p - 1)).masked_fill(zero, 0)
        return found, None, None, None, None
