"""Operators that move or repeat elements: ``flip``, ``roll``, ``repeat``, ``repeat_interleave``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import DTensor, Partial, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    FunctionOp,
    Moving,
    OpSummary,
    S,
    Signature,
    Solution,
    dispatch,
    fit_rank,
    normal_dim,
    pending_rows,
    plain,
    remembered,
)
from hyper_parallel_ops_basic.shape.cat import packed_or_plain, sections_of


class Flip(Moving):
    """``flip``, ``fliplr``, ``flipud``.

    Args:
        dims: the dimensions, when the function has no argument for them.
    """

    summary = OpSummary(
        "every dim",
        pending="passes, of any kind",
        communicates="sharded flipped dim: 1 all-to-all of the elements that change rank | the same",
    )

    signature = "input, *dims"

    def __init__(self, op_name: str, *, dims: Sequence[int] | None = None) -> None:
        super().__init__(op_name)
        self.fixed = dims

    def maps(self, call: Call) -> dict[int, torch.Tensor]:
        shape = call.inputs[0].shape
        given = call.arg("dims", ()) if self.fixed is None else self.fixed
        dims = (normal_dim(d, len(shape)) for d in ((given,) if isinstance(given, int) else given))
        return {d: torch.arange(shape[d]).flip(0) for d in dims}


class Roll(Moving):
    """``roll(x, shifts, dims)``; without dims the flattened tensor is rolled, which keeps no dimension."""

    summary = OpSummary(
        "every dim",
        pending="passes, of any kind",
        communicates="sharded rolled dim: 1 all-to-all of the elements that change rank | the same",
        whole="a roll of the flattened tensor, which keeps no dim",
    )

    signature = "input, shifts, dims=None"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        return pending_rows(call) if self._flattens(call) else super().strategies(call)

    @staticmethod
    def _flattens(call: Call) -> bool:
        return call.arg("dims") in (None, (), []) and len(call.inputs[0].shape) > 1

    def maps(self, call: Call) -> dict[int, torch.Tensor]:
        if self._flattens(call):
            return {}
        shape, shifts, dims = call.inputs[0].shape, call.arg("shifts"), call.arg("dims") or (0,)
        shifts, dims = ((v,) if isinstance(v, int) else tuple(v) for v in (shifts, dims))
        if len(shifts) != len(dims):
            raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}")
        total: dict[int, int] = {}
        for shift, dim in zip(shifts, dims, strict=True):
            dim = normal_dim(dim, len(shape))
            total[dim] = total.get(dim, 0) + shift
        return {d: torch.arange(shape[d]).roll(shift) for d, shift in total.items() if len(shape)}


class Repeat(StrategyOp):
    """``repeat`` and ``tile``: whole copies side by side, which along a dimension that one axis shards are packed
    sections; where several axes shard it the copies travel to a plain shard of the result."""

    summary = OpSummary(
        "every dim; a repeated one, on one axis, becomes `PackedShard`",
        pending="passes, of any kind",
        communicates="repeated dim that several axes shard: 1 all-to-all of the elements that change rank | the same",
    )

    signature = "input, *sizes, repeats, dims"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        spec = call.inputs[0]
        times = self.times(call)
        added = len(times) - len(spec.shape)
        for d, size in enumerate(spec.shape):
            axes = spec.layout.shard_order[d]
            if times[d + added] == 1 or len(axes) > 1:
                yield Strategy([S(d)], S(d + added))
            elif axes:
                have = spec.layout.placements[axes[0]]
                yield Strategy([have], packed_or_plain(d + added, sections_of(have, size) * times[d + added]))
        yield from pending_rows(call)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        target, (output,) = solution.targets[0], solution.outputs
        assert output is not None
        times, shape = self.times(call), tuple(call.inputs[0].shape)
        added = len(times) - len(shape)
        spread = [d for d in range(len(shape)) if times[d + added] != 1 and len(target.shard_order[d]) > 1]
        if not spread:
            return solution
        output = plain(fit_rank(output, len(times)), [d + added for d in spread])
        copies = [1 if d - added in spread else n for d, n in enumerate(times)]
        moves = [
            (at, ExchangePlan.between(target, shape[d], d, output, at, torch.arange(shape[d]).repeat(times[at])))
            for d in spread
            for at in [d + added]
        ]

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            x = x.repeat(copies)
            for d, move in moves:
                x = move(x, d)
            return x

        solution.outputs, solution.local = [output], local
        return solution

    @staticmethod
    def times(call: Call) -> list[int]:
        """How often each dimension of the result repeats that of the tensor."""
        given = [int(n) for n in call.arg("sizes") or call.arg("repeats") or call.arg("dims") or ()]
        return [1] * (len(call.inputs[0].shape) - len(given)) + given


def repeated(input: torch.Tensor, repeats: Any, dim: int, output_size: int | None) -> torch.Tensor:
    """``torch.repeat_interleave`` with the size of the result known."""
    return torch.repeat_interleave(input, repeats, dim, output_size=output_size)


_REPEATS = Signature("input, repeats, dim, output_size")


class RepeatInterleave(FunctionOp):
    """``repeat_interleave(x, repeats, dim)``, and ``repeat_interleave(repeats)``, which repeats the positions.

    A tensor of repeats is data that every rank needs: it says where each element goes, and how many there are.
    """

    summary = OpSummary(
        "every dim",
        pending="passes, of any kind",
        communicates="sharded repeated dim: 1 all-to-all of the elements that change rank | the same",
        whole="a tensor of repeats (1 all-gather): where an element goes depends on those before",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._run(*args, **_REPEATS.with_own_names(func, kwargs))

    @staticmethod
    def _run(input: Any = None, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None) -> Any:
        if input is None or repeats is None:  # the one tensor given has the repeats
            repeats = input if repeats is None else repeats
            input = torch.ones_like(repeats).cumsum(0) - 1
        if dim is None:
            input, dim = input.flatten(), 0
        if isinstance(repeats, DTensor):
            repeats = remembered(repeats, repeats.layout.replicated())
        if isinstance(repeats, torch.Tensor) and output_size is None:
            output_size = int(repeats.sum()) * (input.shape[dim] if repeats.numel() == 1 else 1)
        return dispatch(repeated, (input, repeats, dim, output_size), {})


class Repeated(Moving):
    """:func:`repeated`: along a sharded dim the copies go where the result's shards are."""

    summary = RepeatInterleave.summary
    signature = "input, repeats, dim, output_size"

    def maps(self, call: Call) -> dict[int, torch.Tensor]:
        if call.index("repeats") is not None:
            return {}  # data; see solve
        dim = self.repeated_dim(call)
        return {dim: torch.arange(call.inputs[0].shape[dim]).repeat_interleave(int(call.arg("repeats")))}

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.inputs[0].shape)):
            yield Strategy({"input": S(d)}, S(d))
        for pending in {p for p in call.inputs[0].layout.placements if isinstance(p, Partial)}:
            yield Strategy({"input": pending}, pending)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        at, target, output = self.repeated_dim(call), solution.targets[0], solution.outputs[0]
        assert output is not None
        if call.index("repeats") is None or not target.shard_order[at]:
            return solution
        output, size = plain(fit_rank(output, target.ndim), [at]), call.inputs[0].shape[at]

        def local(x: torch.Tensor, repeats: torch.Tensor, dim: int, output_size: int) -> torch.Tensor:
            index = torch.arange(size).repeat_interleave(repeats.cpu(), output_size=output_size)
            return ExchangePlan.between(target, size, at, output, at, index)(x, at)

        solution.outputs[0], solution.local = output, local
        return solution

    @staticmethod
    def repeated_dim(call: Call) -> int:
        dim = call.dim("dim")
        assert dim is not None
        return dim
