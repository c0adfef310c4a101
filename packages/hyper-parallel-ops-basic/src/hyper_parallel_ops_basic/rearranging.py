"""Operators that move or repeat elements: ``flip``, ``roll``, ``repeat``, ``repeat_interleave``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.call import Call, normal_dim, refuse
from hyper_parallel.layout import Layout
from hyper_parallel.placements import PackedShard
from hyper_parallel.strategy import R, S, Strategy, StrategyOp
from hyper_parallel_ops_basic.joining import packed_or_plain, pending_rows


class Flip(StrategyOp):
    """``flip``, ``fliplr``, ``flipud``, ``roll``: every dimension but the named ones stays.

    Args:
        dims: the dimensions, when the function has no argument for them.
    """

    signature = "input, *dims"

    def __init__(self, op_name: str, *, dims: Sequence[int] | None = None) -> None:
        super().__init__(op_name)
        self.fixed = dims

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ndim = len(call.inputs[0].shape)
        moved = {normal_dim(d, ndim) for d in self.moved(call, ndim)}
        for d in range(ndim):
            if d not in moved:
                yield Strategy([S(d)], S(d))
        yield from pending_rows(call)

    def moved(self, call: Call, ndim: int) -> Iterable[int]:
        """The dimensions whose elements change place."""
        return call.arg("dims", ()) if self.fixed is None else self.fixed


class Roll(Flip):
    """``roll(x, shifts, dims)``; without dims the flattened tensor is rolled, so no dimension stays."""

    signature = "input, shifts, dims=None"

    def moved(self, call: Call, ndim: int) -> Iterable[int]:
        dims = call.arg("dims")
        if dims is None or dims == ():
            return range(ndim)
        return dims if isinstance(dims, (tuple, list)) else (dims,)


class Repeat(StrategyOp):
    """``repeat`` and ``tile``: whole copies side by side, which along a sharded dimension are packed sections."""

    signature = "input, *sizes"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        spec = call.inputs[0]
        times = self.times(call)
        added = len(times) - len(spec.shape)
        for d, size in enumerate(spec.shape):
            axes = spec.layout.shard_order[d]
            if times[d + added] == 1:
                yield Strategy([S(d)], S(d + added))
            elif len(axes) == 1 and not isinstance(spec.layout.placements[axes[0]], PackedShard):
                yield Strategy([S(d)], packed_or_plain(d + added, (size,) * times[d + added]))
        yield from pending_rows(call)

    @staticmethod
    def times(call: Call) -> list[int]:
        """How often each dimension of the result repeats that of the tensor."""
        given = [int(n) for n in call.bound.get("sizes") or call.kwargs.get("repeats") or call.kwargs.get("dims") or ()]
        return [1] * (len(call.inputs[0].shape) - len(given)) + given


class RepeatInterleave(StrategyOp):
    """``repeat_interleave(x, repeats, dim)`` with a number, or with a tensor of repeats and ``output_size``."""

    signature = "input, repeats, dim=None, *, output_size=None"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        spec = call.inputs[0]
        dim = call.dim("dim")
        by_tensor = call.index("repeats") is not None
        if by_tensor and call.arg("output_size") is None:
            raise refuse(
                call,
                "the number of elements of the result depends on data",
                "pass output_size=, or an int for repeats",
            )
        for d, size in enumerate(spec.shape):
            if dim is None:
                continue
            if d != dim:
                yield Strategy([S(d)], S(d))
            elif not by_tensor and self._stays(spec.layout, d, size, int(call.arg("repeats"))):
                yield Strategy([S(d)], S(d))
        if not by_tensor:
            yield from pending_rows(call)
        for pending in {p for p in spec.layout.placements if p != R and not hasattr(p, "dim")} if by_tensor else ():
            yield Strategy([pending], pending)

    @staticmethod
    def _stays(layout: Layout, dim: int, size: int, times: int) -> bool:
        """Whether the repeated pieces are the shards of the repeated dimension."""
        axes = layout.shard_order[dim]
        ways = math.prod(layout.mesh_shape[a] for a in axes)
        return bool(axes) and size % ways == 0 and not any(isinstance(layout.placements[a], PackedShard) for a in axes)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if call.arg("output_size") is None or not targets[0].shard_order[call.dim("dim") or 0]:
            return None
        # The total is that of the whole tensor.
        times, dim = call.arg("repeats"), call.dim("dim")
        return lambda x, *args, **kwargs: x.repeat_interleave(times, dim)
