"""Reading a part of a tensor: ``x[...]``, ``narrow``, ``select``.

A slice of a sharded dimension stays sharded, and a view, when the pieces that the ranks hold of it are what a placement
says (``x[8]`` over two ranks: ``x[2:6]`` is two and two; ``x[:4]`` would be four and none). Otherwise that dimension
has to be brought to Replicate first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hyper_parallel.call import Call, Solution, refuse
from hyper_parallel.families.ranges import fit_ranges
from hyper_parallel.layout import Layout
from hyper_parallel.placements import Partial, Placement, Replicate, on_dim
from hyper_parallel.spec import contiguous_stride, make_spec
from hyper_parallel.strategy import R, S, Strategy, StrategyOp
from hyper_parallel_ops_basic.index_arguments import Index


class GetItem(StrategyOp):
    """``x[index]``.

    Attributes:
        says_length: whether the call names a length even where it takes all (``narrow``).
    """

    makes_views = True
    says_length = False

    def index(self, call: Call) -> Index:
        """The index in its one general form."""
        return Index(call.args[1], call.inputs[0].shape)

    def strategies(self, call: Call) -> Iterable[Strategy]:
        index, spec = self.index(call), call.inputs[0]
        for dim, picked in index.ranges().items():
            if spec.layout.shard_order[dim] or len(picked) == spec.shape[dim]:
                yield Strategy([S(dim)], S(index.result.index(dim)))
        yield from _gather_rows(index, len(call.inputs))
        for pending in {p for p in spec.layout.placements if isinstance(p, Partial)}:
            yield Strategy([pending], pending)

    def solve(self, call: Call) -> Solution:
        index = self.index(call)
        spec = call.inputs[0]
        layout = layout_that_can_be_indexed(spec.layout, tuple(spec.shape), index)
        if layout is not spec.layout:
            if call.mode.policy != "auto":
                raise refuse(
                    call,
                    "the index picks from a sharded dimension what its shards cannot keep",
                    f"redistribute the tensor to {layout} first, or use redistribute_policy('auto')",
                )
            call = copy.copy(call)
            call.inputs = [spec.replace(layout=layout), *call.inputs[1:]]
        solution = super().solve(call)
        self._keep_ranges(call, index, solution)
        solution.is_view = index.is_basic
        if index.has_mask:
            _solve_by_data(solution, call, index)
        return solution

    def _keep_ranges(self, call: Call, index: Index, solution: Solution) -> None:
        """Give the result the placements of the kept ranges, and the local call this rank's slices."""
        shape, target, output = tuple(call.inputs[0].shape), solution.targets[0], solution.outputs[0]
        assert output is not None
        slices = {}
        for dim, picked in index.ranges().items():
            if not target.shard_order[dim]:
                continue
            # The engine may have put one more axis on the dim than the range can take.
            target, (kept,) = fit_ranges(target, shape, dim, [picked])
            given_up = {a: Replicate() for a in solution.targets[0].shard_order[dim] if a not in kept.placements}
            at = index.result.index(dim)
            output = output.with_placements(given_up)
            placements = [
                on_dim(kept.placements[a], at) if a in kept.placements else p for a, p in enumerate(output.placements)
            ]
            output = output.with_order(tuple(placements), output.shard_order)
            if self.says_length or len(picked) != shape[dim]:
                slices[dim] = kept.local
        solution.targets[0], solution.outputs[0] = target, output
        if slices:
            solution.local = self.on_piece(index, slices)

    def on_piece(self, index: Index, changed: dict[int, slice]) -> Callable[..., Any]:
        """The local call with other slices on some dims."""
        parts = local_parts(index, changed)

        def get(x: torch.Tensor, given: Any) -> torch.Tensor:
            given = given if isinstance(given, tuple) else (given,)
            return x[tuple(given[p] if isinstance(p, int) else p.value for p in parts)]

        return get


class Fixed:
    """A part of a local index that is known beforehand."""

    def __init__(self, value: Any) -> None:
        self.value = value


def local_parts(index: Index, changed: dict[int, slice]) -> list[Fixed | int]:
    """The index for the local tensor: known parts, and for index tensors their position in the index given."""
    parts: list[Fixed | int] = []
    for item in index.items:
        if item.kind == "range":
            picked = item.value
            parts.append(Fixed(changed.get(item.dim, slice(picked.start, picked.stop, picked.step))))
            if item.dim not in changed and len(picked) == index.shape[item.dim]:
                parts[-1] = Fixed(slice(None))
        elif item.kind in ("tensor", "mask"):
            assert item.where is not None
            parts.append(item.where)
        else:
            parts.append(Fixed(item.value))
    return parts


def layout_that_can_be_indexed(layout: Layout, shape: tuple[int, ...], index: Index) -> Layout:
    """``layout`` itself, or with Replicate on the mesh axes whose shards the index cannot keep."""
    for dim in [*index.ints(), *index.gathered_dims()]:
        layout = layout.with_placements({a: Replicate() for a in layout.shard_order[dim]})
    for dim, picked in index.ranges().items():
        layout, _ = fit_ranges(layout, shape, dim, [picked])
    return layout


def _gather_rows(index: Index, count: int) -> Iterable[Strategy]:
    """Index tensors that are sharded alike, on a tensor that is not."""
    items = [i for i in index.items if i.kind == "tensor"]
    for b, size in enumerate(index.broadcast or ()):
        inputs: list[Placement] = [R] * count
        legal = True
        for item in items:
            own = b - (len(index.broadcast or ()) - len(item.value))
            if own >= 0 and item.value[own] == size:
                if item.ref is None:  # a list is the same on every rank
                    legal = False
                else:
                    inputs[item.ref.index] = S(own)
        if legal:
            yield Strategy(inputs, S((index.gathered or 0) + b))


def _solve_by_data(solution: Solution, call: Call, index: Index) -> None:
    """A mask: the result's shape is known only when it was computed, equally on all ranks."""
    layout, run = solution.outputs[0], solution.local or call.func
    assert layout is not None
    sources, ranges = index.result, index.ranges()

    def get(x: torch.Tensor, given: Any) -> Any:
        from hyper_parallel.dtensor import wrap

        out = run(x, given)
        order = (layout.shard_order + ((),) * out.ndim)[: out.ndim]
        placed = layout.with_order(layout.placements, order)
        shape = [
            len(ranges[source]) if axes and source is not None else size
            for size, axes, source in zip(out.shape, order, sources, strict=True)
        ]
        varying = frozenset(a for a in call.inputs[0].varying if isinstance(placed.placements[a], Replicate))
        return wrap(out, make_spec(placed, shape, contiguous_stride(shape), out.dtype, varying))

    solution.local, solution.meta = get, _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class Narrow(GetItem):
    """``narrow(x, dim, start, length)``."""

    says_length = True
    signature = "input, dim, start, length"

    def index(self, call: Call) -> Index:
        shape = call.inputs[0].shape
        dim, start, length = call.dim("dim"), int(call.arg("start")), int(call.arg("length"))
        assert dim is not None
        start = start + shape[dim] if start < 0 else start
        if not 0 <= start <= start + length <= shape[dim]:
            raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({shape[dim]}).")
        return Index((slice(None),) * dim + (slice(start, start + length),), shape)

    def on_piece(self, index: Index, changed: dict[int, slice]) -> Callable[..., Any]:
        parts = tuple(p.value for p in local_parts(index, changed) if isinstance(p, Fixed))
        return lambda x, *args, **kwargs: x[parts]


class Select(Narrow):
    """``select(x, dim, index)``."""

    signature = "input, dim, index"

    def index(self, call: Call) -> Index:
        dim = call.dim("dim")
        assert dim is not None
        return Index((slice(None),) * dim + (int(call.arg("index")),), call.inputs[0].shape)
