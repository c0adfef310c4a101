"""``npu_rotary_mul`` and ``npu_swiglu``: elementwise but for one dim, whose halves or pairs belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    OpSummary,
    P,
    S,
    Solution,
    broadcast_shape,
    dim_intervals,
    fit_rank,
    indices_of,
    normal_dim,
    plain,
    shard_if_full,
)
from hyper_parallel_ops_deepseek.reference import rotated, with_rotated

__all__ = ["RotaryMul", "SwiGLU"]


class RotaryMul(StrategyOp):
    """``npu_rotary_mul(input, r1, r2, rotary_mode)``: every dim; cosines and sines follow where they are not broadcast.
    Along a sharded last dim the elements travel whose partners, with which they are rotated, another rank holds.
    Linear in the input, and in the two together."""

    summary = OpSummary(
        "every dim, cosines and sines alike; broadcast dims stay whole",
        pending="passes through the input, or through cosines and sines together",
        communicates="sharded last dim: 1 all-to-all of the input's elements whose partners are on another rank | the "
        "same; none where a rank holds whole pairs (interleave) or its part of both halves (`PackedShard` of them)",
    )

    signature = "input, r1, r2, rotary_mode=half"

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        return [broadcast_shape([spec.shape for spec in call.inputs])]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        (out,) = self.output_shapes(call)
        for d in range(len(out)):
            yield Strategy([shard_if_full(spec.shape, d, out) for spec in call.inputs], S(d))
        yield Strategy({"input": P}, P)
        yield Strategy({"r1": P, "r2": P}, P)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        target, shape = targets[call.position("input")], tuple(call.spec("input").shape)
        last, size = len(shape) - 1, shape[-1]
        if not target.shard_order[last]:
            return None
        partners = rotated(torch.arange(1, size + 1), call.arg("rotary_mode", "half"))  # from 1, so as to have a sign
        move = ExchangePlan.between(target, size, last, target, last, partners.abs() - 1)
        if not move.communicates:
            return None  # all partners are together, in the order that the function itself expects
        held = dim_intervals(target, shape, last, call.info.my_coordinate())
        signs, arguments = partners.sign()[indices_of(held)], self.arguments

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            x = given["input"]
            return with_rotated(x, move(x, last) * signs.to(x), given["r1"], given["r2"])

        return local


class SwiGLU(StrategyOp):
    """``npu_swiglu(self, dim)``: every dim. Along a sharded ``dim`` the elements travel whose other half another rank
    holds; none where gate and up are sharded each on its own, as a fused column-parallel projection gives them."""

    summary = OpSummary(
        "every dim; the halved one comes out as a plain shard",
        communicates="sharded halved dim: 1 all-to-all of the elements that change rank | the same; none where it is "
        "`PackedShard` of its two halves",
    )

    signature = "self, dim=-1"

    def output_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        shape, dim = list(call.inputs[0].shape), self.halved(call)
        if shape[dim] % 2:
            return None
        shape[dim] //= 2
        return [tuple(shape)]

    @staticmethod
    def halved(call: Call) -> int:
        """The dim that is cut in halves."""
        return normal_dim(call.arg("dim", -1), len(call.inputs[0].shape))

    def strategies(self, call: Call) -> Iterable[Strategy]:
        shape, dim = call.inputs[0].shape, self.halved(call)
        for d in range(len(shape)):
            if d != dim or shape[d] % 2 == 0:
                yield Strategy([S(d)], S(d))

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        target, output = solution.targets[0], solution.outputs[0]
        dim = self.halved(call)
        if output is None or not target.shard_order[dim]:
            return solution
        output = plain(fit_rank(output, target.ndim), [dim])
        size = call.inputs[0].shape[dim]
        gate_and_up = torch.arange(size).view(2, -1).T  # that make each element of the result
        move, func, arguments = (
            ExchangePlan.between(target, size, dim, output, dim, gate_and_up),
            call.func,
            self.arguments,
        )

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            pairs = move(arguments.bind(args, kwargs)["self"], dim).unflatten(dim, (-1, 2))
            return func(pairs.transpose(dim, dim + 1).flatten(dim, dim + 1), dim)

        solution.outputs[0] = output
        if move.communicates:
            solution.local = local
        return solution
