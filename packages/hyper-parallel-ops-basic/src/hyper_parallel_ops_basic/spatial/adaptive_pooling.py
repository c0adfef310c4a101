"""Adaptive pooling: in place where no window crosses a border between ranks; else whole planes are dealt out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Replicate, Shard, Strategy
from hyper_parallel.rules import Call, Dealt, OpSummary, P, WholeDims, dim_intervals, local_shape, zeros_from
from hyper_parallel_ops_basic.spatial.pooling import in_the_whole

__all__ = ["AdaptivePool"]


class AdaptivePool(WholeDims):
    """``adaptive_avg_pool`` and ``adaptive_max_pool`` of ``[batch, channels, *positions]`` (or without the batch).

    Where positions of input and output divide evenly among the ranks, every rank has windows of its own. Otherwise the
    windows have sizes that no kernel takes but on a whole plane, so that planes are dealt out to the ranks.

    Args:
        dims: number of position dims.
        average: whether it is the mean of a window, else the maximum. The mean of a whole dim leaves a pending sum.
    """

    def __init__(self, op_name: str, *, dims: int, average: bool = False) -> None:
        super().__init__(op_name, signature="input, output_size, return_indices=False")
        self.dims, self.average = dims, average
        self.summary = OpSummary(
            "every dim; positions averaged to one leave a pending sum" if average else "every dim",
            communicates="none where sharded positions and those of the result divide evenly; else 1 all-to-all each "
            "way of whole planes, dealt out to the ranks | the same",
        )

    def num_outputs(self, call: Call) -> int:
        return 2 if call.name.endswith("_with_indices") or call.arg("return_indices") else 1

    def whole_dims(self, call: Call) -> tuple[int, ...]:
        ndim = len(call.inputs[0].shape)
        return tuple(range(ndim - self.dims, ndim))

    def strategies(self, call: Call) -> Iterable[Strategy]:
        folded = self._folded(call)
        for row in super().strategies(call):
            (placement,) = row.inputs
            yield Strategy([placement], P) if isinstance(placement, Shard) and placement.dim in folded else row

    def _folded(self, call: Call) -> list[int]:
        """The dims whose mean is wanted: every rank takes its share of it."""
        before, after = call.inputs[0].shape, call.output_shapes()[0]
        return [d for d in self.whole_dims(call) if self.average and after[d] == 1 and before[d]]

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        (layout,), given = targets, call.inputs[0].shape
        folded = [d for d in self._folded(call) if layout.shard_order[d]]
        rest = layout.with_placements({a: Replicate() for d in folded for a in layout.shard_order[d]})
        shape = tuple(1 if d in folded else n for d, n in enumerate(given))
        pool = self._in_place(call, rest, shape) or self._dealt(call, rest, shape)
        arguments = self.arguments

        def local(*args: Any, **kwargs: Any) -> Any:
            bound = arguments.bind(args, kwargs)
            x = bound.pop("input")
            for d in folded:
                mine = x.shape[d]
                x = x.mean(d, keepdim=True) * (mine / given[d]) if mine else x.sum(d, keepdim=True)
            return pool(x, bound)

        return local

    def _in_place(self, call: Call, layout: Layout, shape: tuple[int, ...]) -> Callable[..., Any] | None:
        """Pooling of this rank's piece, where what it has of each dim is all that its windows read."""
        after, whole, count, func = call.output_shapes()[0], self.whole_dims(call), self.num_outputs(call), call.func
        ways = [math.prod(layout.mesh_shape[a] for a in layout.shard_order[d]) for d in whole]
        plainly = all(type(layout.placements[a]) is Shard for d in whole for a in layout.shard_order[d])
        if not plainly or any(shape[d] % w or after[d] % w for d, w in zip(whole, ways, strict=True)):
            return None
        here = layout.info.my_coordinate()
        sizes = [after[d] // w for d, w in zip(whole, ways, strict=True)]
        planes, begins = local_shape(layout, shape, here)[: whole[0]], {}
        if count == 2 and all(shape[d] for d in whole):
            begins = {i: dim_intervals(layout, shape, d, here)[0][0] for i, d in enumerate(whole)}

        def pool(x: torch.Tensor, given: dict[str, Any]) -> Any:
            if not x.numel():
                zeros = zeros_from((*planes, *sizes), x)
                return zeros if count == 1 else (zeros, torch.zeros_like(zeros, dtype=torch.int64))
            out = func(x, **given | {"output_size": sizes})
            return out if count == 1 else (out[0], in_the_whole(out[1], x.shape[whole[0] :], shape[whole[0] :], begins))

        return pool

    def _dealt(self, call: Call, layout: Layout, shape: tuple[int, ...]) -> Callable[..., Any]:
        """Pooling of whole planes, dealt out to the ranks."""
        dealt, on_planes = Dealt(layout, shape, self.whole_dims(call)), self.on_lines(call)

        def pool(x: torch.Tensor, given: dict[str, Any]) -> Any:
            out = on_planes(dealt.lines(x), given)
            return dealt.back(out) if isinstance(out, torch.Tensor) else tuple(map(dealt.back, out))

        return pool

    def on_lines(self, call: Call) -> Callable[..., Any]:
        func = call.func
        (*shapes,) = call.output_shapes()
        sizes = [shape[len(shape) - self.dims :] for shape in shapes]

        def on_planes(planes: torch.Tensor, given: dict[str, Any]) -> Any:
            if not len(planes):  # which not every kernel takes; joined to the graph all the same
                empty = [planes.reshape(0, *size) for size in sizes]
                return empty[0] if len(empty) == 1 else (empty[0], empty[1].long())
            out = func(planes.unsqueeze(1), **given)
            return out.squeeze(1) if isinstance(out, torch.Tensor) else tuple(t.squeeze(1) for t in out)

        return on_planes
