"""Reading a part of a tensor: ``x[...]``, ``narrow``, ``select``.

A slice of a sharded dimension stays sharded, and a view, when the pieces that the ranks hold of it are what a placement
says (``x[8]`` over two ranks: ``x[2:6]`` is two and two; ``x[:4]`` would be four and none). Otherwise that dimension has
to be brought to Replicate first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.call import Call, Ref, Solution, normal_dim, refuse
from hyper_parallel.families.ranges import fit_ranges, keep_range
from hyper_parallel.layout import Layout
from hyper_parallel.placements import Partial, Placement, Replicate, Shard, on_dim
from hyper_parallel.spec import contiguous_stride, make_spec
from hyper_parallel.strategy import R, S, Strategy, StrategyOp

from hyper_parallel_ops_basic.index_arguments import Index, Item


class GetItem(StrategyOp):
    """``x[index]``."""

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
        solution.is_view = index.is_basic
        if index.has_mask:
            _solve_by_data(solution, call)
        return solution

    def local_function(self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any] | None:
        index, shape, layout = self.index(call), tuple(call.inputs[0].shape), targets[0]
        kept = {d: keep_range(layout, shape, d, r) for d, r in index.ranges().items() if layout.shard_order[d]}
        outputs[0] = _result_layout(outputs[0], index, kept, layout)  # type: ignore[index]
        changed = {d: k.local for d, k in kept.items() if k is not None and len(index.ranges()[d]) != shape[d]}
        return self.on_piece(index, changed) if changed else None

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


def _result_layout(output: Layout, index: Index, kept: dict[int, Any], layout: Layout) -> Layout:
    """The engine's output layout with the placements that the kept ranges have."""
    placements = list(output.placements)
    for dim, found in kept.items():
        if found is None:
            raise ValueError(f"dimension {dim} of {layout} cannot be indexed where it lies; redistribute it to Replicate first")
        for axis, placement in found.placements.items():
            placements[axis] = on_dim(placement, index.result.index(dim))
    return output.with_order(tuple(placements), output.shard_order)


def _solve_by_data(solution: Solution, call: Call) -> None:
    """A mask: the result's shape is known only when it was computed, equally on all ranks."""
    layout, run = solution.outputs[0], solution.local or call.func
    pending = call.inputs[0].varying
    assert layout is not None

    def get(x: torch.Tensor, given: Any) -> Any:
        from hyper_parallel.dtensor import wrap

        out = run(x, given)
        return wrap(out, _spec_of_local(layout, out, shape_of(out), pending))

    def shape_of(out: torch.Tensor) -> tuple[int, ...]:
        order = layout.shard_order
        sizes = list(out.shape)
        for dim, axes in enumerate(order):
            if axes:
                source = Index(call.args[1], call.inputs[0].shape)
                old = source.result[dim]
                assert old is not None
                sizes[dim] = len(source.ranges()[old])
        return tuple(sizes)

    solution.local, solution.meta, solution.outputs = get, _nothing, []


def _spec_of_local(layout: Layout, out: torch.Tensor, shape: tuple[int, ...], varying: frozenset[int]) -> Any:
    order = (layout.shard_order + ((),) * out.ndim)[: out.ndim]
    layout = layout.with_order(layout.placements, order)
    varying = frozenset(a for a in varying if isinstance(layout.placements[a], Replicate))
    return make_spec(layout, shape, contiguous_stride(shape), out.dtype, varying)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class Narrow(GetItem):
    """``narrow(x, dim, start, length)``."""

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
