"""Operators that fold dimensions away: the general form, and those whose terms can stay pending."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, normal_dim
from hyper_parallel._rules.families.over_axes import OverAxes
from hyper_parallel._rules.families.precision import casts_by_term, wide_dtype
from hyper_parallel._rules.op import OpSummary
from hyper_parallel._rules.strategy import S, Strategy, StrategyOp
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial, Placement, Replicate

__all__ = ["Mean", "Product", "Reduction", "Sum"]


class Reduction(StrategyOp):
    """One tensor, some of whose dims are folded; the others may be sharded freely.

    A subclass says in :meth:`folded_output` what a shard of a folded dim leaves on its mesh axis: a pending reduction,
    or Replicate when the local function reduces inside (see :meth:`over`).
    """

    signature = "input, dim=None, keepdim=False, *, dtype=None"

    def given_dims(self, call: Call) -> Any:
        """``dim`` as it was written; None where it was not."""
        return call.arg("dim")

    def folded(self, call: Call) -> tuple[int, ...]:
        """The folded dims, ascending; no ``dim`` (or an empty one) means all of them."""
        ndim, given = len(call.inputs[0].shape), self.given_dims(call)
        if given is None or (isinstance(given, (tuple, list)) and not given):
            return tuple(range(ndim))
        dims = given if isinstance(given, (tuple, list)) else (given,)
        return tuple(sorted({normal_dim(d, ndim) for d in dims})) if ndim else ()

    def keepdim(self, call: Call) -> bool:
        """Whether folded dims stay, with size 1."""
        return bool(call.arg("keepdim", False))

    def output_shapes(self, call: Call) -> Sequence[tuple[int, ...]] | None:
        shape, folded, keep = call.inputs[0].shape, self.folded(call), self.keepdim(call)
        if 0 in shape:
            return None  # some have no value then; the function itself says so
        out = tuple(1 if d in folded else n for d, n in enumerate(shape) if keep or d not in folded)
        return [out] * self.num_outputs(call)

    def strategies(self, call: Call) -> Iterable[Strategy]:
        folded, keep = self.folded(call), self.keepdim(call)
        position = 0
        for d in range(len(call.inputs[0].shape)):
            if d not in folded:
                yield Strategy([S(d)], S(position))
            position += keep or d not in folded
        for d in folded:
            yield Strategy([S(d)], self.folded_output(call))
        yield from self.pending(call)

    def folded_output(self, call: Call) -> Placement:
        """Placement of the outputs on a mesh axis that shards a folded dim."""
        return Replicate()

    def pending(self, call: Call) -> Iterable[Strategy]:
        """Strategies for an input that is a pending reduction itself."""
        return ()

    def over(self, call: Call, targets: Sequence[Layout]) -> OverAxes:
        """The mesh axes that shard folded dims; false when there are none."""
        return OverAxes(targets[0], self.folded(call))

    def count(self, call: Call) -> int:
        """Global number of elements folded into one."""
        return math.prod(call.inputs[0].shape[d] for d in self.folded(call))


def keeps_sums(call: Call) -> bool:
    """Whether a linear function of one tensor may take the terms of a pending sum: of bools none is linear, and
    ``dtype=`` must not round the terms."""
    given = call.inputs[0].dtype
    return given is not torch.bool and casts_by_term(given, call.arg("dtype") or given)


def linear_rows(call: Call) -> Iterable[Strategy]:
    """A pending sum (or average, of floats) passes through a linear function of one tensor."""
    if not keeps_sums(call):
        return
    yield Strategy([Partial()], Partial())
    if call.inputs[0].dtype.is_floating_point:
        yield Strategy([Partial("avg")], Partial("avg"))


class Sum(Reduction):
    """Reductions that leave a pending ``op``: ``sum``, ``nansum``, ``count_nonzero``, ``any`` (max), ``all`` (min).

    Args:
        op: reduce op that joins the ranks' terms.
        linear: whether a pending sum or average passes through.
    """

    def __init__(self, op_name: str, *, op: str = "sum", linear: bool = False) -> None:
        super().__init__(op_name)
        self.op, self.linear = op, linear
        passes = "passes" if linear else "reduced first"
        self.summary = OpSummary(f"every dim; a folded one leaves a pending {op}", passes)

    def folded_output(self, call: Call) -> Placement:
        return Partial(self.op)

    def pending(self, call: Call) -> Iterable[Strategy]:
        return linear_rows(call) if self.linear else ()


class Mean(Reduction):
    """``mean``: the local sum over the *global* count, a pending sum that is exact for uneven shards."""

    summary = OpSummary(
        "every dim; a folded one leaves a pending sum",
        pending="passes",
    )

    def folded_output(self, call: Call) -> Placement:
        return Partial()

    def pending(self, call: Call) -> Iterable[Strategy]:
        return linear_rows(call)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if not self.over(call, targets):
            return None
        dims, keep, count, dtype = self.folded(call), self.keepdim(call), self.count(call), call.arg("dtype")
        return lambda x, *args, **kwargs: mean_term(x, dims, keep, count, dtype)


def mean_term(
    x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, count: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """This rank's term of a mean over ``count`` elements: a sum that no low precision overflows."""
    dtype = dtype or x.dtype
    return (x.sum(dims, keepdim=keepdim, dtype=wide_dtype(dtype)) / count).to(dtype)


class Product(Reduction):
    """``prod``: a pending product; reduced inside where a gradient is needed, which no pending product carries."""

    summary = OpSummary(
        "every dim; a folded one leaves a pending product",
        communicates="none; where a gradient is needed 1 all-gather of the products | slice",
    )

    def folded_output(self, call: Call) -> Placement:
        return Replicate() if call.needs_grad[0] else Partial("product")

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        over = self.over(call, targets)
        if not over or not call.needs_grad[0]:
            return None
        # The ranks' products are multiplied by torch's own prod: its gradient is right with zeros among them.
        return lambda x, *args, **kwargs: over.gather(call.func(x, *args, **kwargs)).prod(0)
