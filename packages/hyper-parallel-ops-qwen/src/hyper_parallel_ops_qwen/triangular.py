"""Triangular systems, which the chunks of the gated delta rule are."""

from __future__ import annotations

from collections.abc import Iterable

from hyper_parallel import Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, P, S, broadcast_shape, shard_if_full


class SolveTriangular(StrategyOp):
    """``torch.linalg.solve_triangular(A, B, *, upper, left=True, unitriangular=False)``.

    Batch dims are sharded alike, the right-hand sides on their own; a pending sum of them passes, the solution being
    linear in it. Along the unknowns each one needs those before it: that dim stays whole.
    """

    summary = OpSummary(
        "batch dims, right-hand sides",
        pending="passes through the right-hand sides",
        whole="the unknowns: each needs those before it",
    )

    signature = "A, B, *, upper, left=True, unitriangular=False"

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        a, b = tuple(call.spec("A").shape), tuple(call.spec("B").shape)
        return [(*broadcast_shape([a[:-2], b[:-2]]), *b[-2:])]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        a, b = tuple(call.spec("A").shape), tuple(call.spec("B").shape)
        (out,) = self.output_shapes(call)
        for d in range(len(out) - 2):
            # A batch dim that is broadcast stays whole.
            yield Strategy({n: shard_if_full(x[:-2], d, out[:-2]) for n, x in (("A", a), ("B", b))}, S(d))
        of_sides = -1 if call.arg("left", True) else -2
        yield Strategy({"B": S(len(b) + of_sides)}, S(len(out) + of_sides))
        yield Strategy({"B": P}, P)
