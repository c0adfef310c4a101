"""Operators that only rearrange: reshaping by sizes, and renaming of dimensions."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.boxes import local_shape
from hyper_parallel.call import Call, Solution, normal_dim, refuse
from hyper_parallel.layout import Layout
from hyper_parallel.op import OpSummary
from hyper_parallel.placements import PackedShard, Placement, Replicate, Shard, on_dim
from hyper_parallel.strategy import LayoutOp


def dim_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of old and new dims that hold the same elements: ``[2, 12] -> [2, 3, 4]`` is ``[([0], [0]),
    ([1], [1, 2])]``.

    With a size of 0 somewhere everything is one group.
    """
    if 0 in old or 0 in new:
        same = list(old) == list(new)
        return [([d], [d]) for d in range(len(old))] if same else [(list(range(len(old))), list(range(len(new))))]
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = [], []
        left = right = 1
        if i < len(old):
            a, left, i = [i], old[i], i + 1
        if j < len(new):
            b, right, j = [j], new[j], j + 1
        while left != right:
            if left < right:
                a.append(i)
                left, i = left * old[i], i + 1
            else:
                b.append(j)
                right, j = right * new[j], j + 1
        groups.append((a, b))
    return groups


class Reshape(LayoutOp):
    """Reshape by global sizes: ``view``, ``reshape``, ``flatten``, ``unflatten``, ``squeeze``, ``unsqueeze``,
    ``view_as``.

    The output shape is that of the function on meta tensors. Shards follow their elements: a split gives the axes to
    the new dims outermost first; flattening a sharded inner dim gives a :class:`PackedShard`. Pending reductions pass.
    """

    summary = OpSummary(
        "every dim whose shards fall on bounds of the new dims (a flattened inner dim becomes `PackedShard`)",
        pending="passes, of any kind",
        whole="shards that fall between bounds of the new dims: no layout describes the result",
    )

    # view_as and reshape_as read only the shape of the second tensor.
    uncounted = (1,)
    makes_views = True

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        (new,) = call.output_shapes()
        layout, target = reshaped_layout(spec.layout, tuple(spec.shape), new)
        if target is not spec.layout and call.mode.policy != "auto":
            raise refuse(
                call,
                f"shape {tuple(spec.shape)} to {new}: the shards do not fall on boundaries of the new dimensions",
                f"redistribute to {target} first, or use redistribute_policy('auto')",
            )
        sizes = local_shape(layout, new, layout.info.my_coordinate())
        targets = [target, *(s.layout for s in call.inputs[1:])]
        # A view or a copy as on one device, which the strides of the global tensor decide: those of a piece may differ.
        is_view = is_alias(call.meta_result(), spec.meta)
        local = _view_as_sizes(sizes) if is_view else _copy_of_sizes(sizes)
        return Solution(targets, [layout], local, uncounted=self.positions(call, self.uncounted), is_view=is_view)


def is_alias(result: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a result on meta tensors is its source or a view of it."""
    return result is source or result._base is source


class Contiguous(LayoutOp):
    """``contiguous``: the tensor itself where the global one is contiguous, else a copy on every rank."""

    summary = OpSummary(
        "every dim",
        pending="passes, of any kind",
    )

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        is_view = is_alias(call.meta_result(), spec.meta)

        def copy(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = call.func(x, *args, **kwargs)
            return out.clone(memory_format=torch.preserve_format) if out is x else out

        return Solution([spec.layout], [spec.layout], None if is_view else copy, is_view=is_view)


def _view_as_sizes(sizes: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: x.view(sizes)


def _copy_of_sizes(sizes: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: x.clone(memory_format=torch.contiguous_format).view(sizes)


def reshaped_layout(layout: Layout, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Layout, Layout]:
    """Output layout of a reshape, and the layout that its input must have (the same where the shards fit)."""
    between = common_refinement(old, new)
    if between is not None:
        middle, target = reshaped_layout(layout, old, between)
        out, fitting = reshaped_layout(middle, between, new)
        if target is layout and fitting is middle:
            return out, layout
        kept = {a for axes in fitting.shard_order for a in axes} & {a for axes in target.shard_order for a in axes}
        gone = {a: Replicate() for axes in layout.shard_order for a in axes if a not in kept}
        return reshaped_layout(layout.with_placements(gone), old, new)
    placements: list[Placement] = list(layout.placements)
    order: list[tuple[int, ...]] = [()] * len(new)
    drop: list[int] = []
    for a, b in dim_groups(old, new):
        if not any(layout.shard_order[d] for d in a):
            continue
        placed = _group_placements(layout, [old[d] for d in a], a, [new[d] for d in b], b)
        if placed is None:
            drop.extend(axis for d in a for axis in layout.shard_order[d])
            continue
        for dim, axes in placed.items():
            order[dim] = tuple(axis for axis, _ in axes)
            for axis, placement in axes:
                placements[axis] = placement
    if drop:
        target = layout.with_placements(dict.fromkeys(drop, Replicate()))
        return reshaped_layout(target, old, new)[0], target
    return layout.with_order(tuple(placements), tuple(order)), layout


def common_refinement(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """The sizes between, when a reshape splits dims and joins the parts with others: ``(6, 4) -> (2, 12)`` is ``(6, 4)
    -> (2, 3, 4) -> (2, 12)``. None when it does not, or when there are none.
    """
    many = [(a, b) for a, b in dim_groups(old, new) if min(_big(old, a), _big(new, b)) > 1]
    if not many or 0 in old or 0 in new:
        return None
    bounds = sorted({*itertools.accumulate(old, operator.mul), *itertools.accumulate(new, operator.mul), 1})
    if any(b % a for a, b in itertools.pairwise(bounds)):
        return None
    return tuple(b // a for a, b in itertools.pairwise(bounds))


def _big(sizes: tuple[int, ...], dims: list[int]) -> int:
    """How many of these dims have more than one index."""
    return sum(sizes[d] != 1 for d in dims)


def _group_placements(
    layout: Layout, old: list[int], a: list[int], new: list[int], b: list[int]
) -> dict[int, list[tuple[int, Placement]]] | None:
    """Where the axes that shard the old dims ``a`` go among the new dims ``b``; None when they do not fit."""
    if len(a) == 1 and len(b) == 1:
        return {b[0]: [(axis, on_dim(layout.placements[axis], b[0])) for axis in layout.shard_order[a[0]]]}
    big_old = [i for i, n in enumerate(old) if n != 1]
    if any(layout.shard_order[a[i]] for i in range(len(a)) if i not in big_old):
        return None  # a shard of a dim of size 1 has nowhere to go
    if len(big_old) == 1:
        return _split(layout, a[big_old[0]], old[big_old[0]], new, b)
    if sum(n != 1 for n in new) == 1:
        return _flatten(layout, old, a, next(d for d, n in zip(b, new, strict=True) if n != 1))
    return None


def _split(
    layout: Layout, dim: int, size: int, new: list[int], b: list[int]
) -> dict[int, list[tuple[int, Placement]]] | None:
    """One dim into several: axes go to the new dims outermost first."""
    placed: dict[int, list[tuple[int, Placement]]] = {}
    left = list(new)  # what is left of each new dim after the axes placed so far
    alone = len(layout.shard_order[dim]) == 1
    for axis in layout.shard_order[dim]:
        placement, parts = layout.placements[axis], layout.mesh_shape[axis]
        if isinstance(placement, PackedShard):  # the outermost axis
            found = _split_packed(placement, size, parts, new, b)
            if found is None or not (alone or found.__class__ is Shard):
                return None
            placed[found.dim] = [(axis, found)]
            if alone:
                return placed
            within = b.index(found.dim)
            if left[within] % parts:
                return None
            left[within] //= parts
            continue
        position = next((i for i, n in enumerate(left) if n != 1), None)
        if position is None:
            return None
        inner = math.prod(left[position + 1 :])
        rows = left[position]
        if inner == 1:  # nothing below: any chunking is one of this dim
            placed.setdefault(b[position], []).append((axis, Shard(b[position])))
            if rows % parts:
                return placed if axis == layout.shard_order[dim][-1] else None
        elif rows % parts == 0:
            placed.setdefault(b[position], []).append((axis, Shard(b[position])))
        else:
            return None
        left[position] = rows // parts
    return placed


def _split_packed(placement: PackedShard, size: int, parts: int, new: list[int], b: list[int]) -> Shard | None:
    """A packed dim into several: sections become a dim of their own, or stay sections of the outermost new dim."""
    sections = placement.sections
    for position in range(1, len(new) if len(set(sections)) == 1 else 0):
        rest = math.prod(new[position + 1 :])
        if new[position] * rest == sections[0] and new[position] != 1 and (rest == 1 or new[position] % parts == 0):
            return Shard(b[position])
    inner = size // new[0]
    if all(s % inner == 0 and (s // inner) % parts == 0 for s in sections):
        return PackedShard(b[0], tuple(s // inner for s in sections))
    return None


def _flatten(layout: Layout, old: list[int], a: list[int], out: int) -> dict[int, list[tuple[int, Placement]]] | None:
    """Several dims into one: a sharded outermost dim stays a plain shard, a sharded inner dim becomes packed."""
    plain: list[tuple[int, Placement]] = []
    packed: list[tuple[int, Placement]] = []
    outermost = True
    for position, (dim, size) in enumerate(zip(a, old, strict=True)):
        axes = layout.shard_order[dim]
        inner = math.prod(old[position + 1 :])
        for axis in axes:
            if isinstance(layout.placements[axis], PackedShard):
                return None
        ways = math.prod(layout.mesh_shape[axis] for axis in axes)
        if axes and size % ways and inner != 1:
            return None  # uneven pieces of an outer dim end between the chunks of the flat one
        if axes and outermost:
            plain += [(axis, Shard(out)) for axis in axes]
        elif axes:
            if packed or len(axes) > 1:
                return None
            rows = math.prod(old[:position])
            packed.append((axes[0], PackedShard(out, (size * inner,) * rows)))
            if size % ways and plain:
                return None
        if size != 1:
            outermost = False
    return {out: packed + plain}


class DimMap(LayoutOp):
    """Operators that reorder whole dimensions: ``transpose``, ``permute``, ``movedim``, ``T``, ``unsqueeze`` and so on.

    Args:
        kind: which argument form the function has.
    """

    summary = OpSummary(
        "every dim",
        pending="passes, of any kind",
    )

    makes_views = True

    def __init__(self, op_name: str, *, kind: str) -> None:
        self.kind = kind
        super().__init__(op_name)

    def solve(self, call: Call) -> Solution:
        layout = call.inputs[0].layout
        order = _KINDS[self.kind](call, layout.ndim)
        mapping: list[int | None] = [None] * layout.ndim
        for new, old in enumerate(order):
            mapping[old] = new
        return Solution([layout], [layout.move_dims(mapping, len(order))], is_view=True)


def _arguments(call: Call, *names: str) -> list[Any]:
    """Positional arguments after the tensor, or keyword ones by name."""
    positional = list(call.args[1:])
    return positional + [call.kwargs[n] for n in names[len(positional) :] if n in call.kwargs]


def _swap(call: Call, ndim: int) -> list[int]:
    a, b = (normal_dim(d, ndim) for d in _arguments(call, "dim0", "dim1"))
    order = list(range(ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return order


def _permute(call: Call, ndim: int) -> list[int]:
    given = _arguments(call, "dims")
    dims = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return [normal_dim(d, ndim) for d in dims]


def _reverse(call: Call, ndim: int) -> list[int]:
    return list(reversed(range(ndim)))


def _swap_last(call: Call, ndim: int) -> list[int]:
    return [*range(ndim - 2), ndim - 1, ndim - 2]


def _movedim(call: Call, ndim: int) -> list[int]:
    source, destination = _arguments(call, "source", "destination")
    sources = [normal_dim(d, ndim) for d in ([source] if isinstance(source, int) else source)]
    targets = [normal_dim(d, ndim) for d in ([destination] if isinstance(destination, int) else destination)]
    order: list[int | None] = [None] * ndim
    for s, t in zip(sources, targets, strict=True):
        order[t] = s
    rest = iter(d for d in range(ndim) if d not in sources)
    return [next(rest) if d is None else d for d in order]


_KINDS: dict[str, Callable[[Call, int], list[int]]] = {
    "swap": _swap,
    "permute": _permute,
    "reverse": _reverse,
    "swap_last": _swap_last,
    "movedim": _movedim,
}


class Expand(LayoutOp):
    """``expand``, ``expand_as``, ``broadcast_to``: dims of size 1 grow, new dims come in front."""

    summary = OpSummary(
        "every dim that does not grow",
        pending="passes, of any kind",
        whole="a sharded dim of size 1 that grows",
    )

    uncounted = (1,)
    makes_views = True

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        (new,) = call.output_shapes()
        added = len(new) - len(spec.shape)
        target = spec.layout
        grown = [d for d, n in enumerate(spec.shape) if n != new[d + added] and target.shard_order[d]]
        if grown:
            target = target.with_placements({a: Replicate() for d in grown for a in target.shard_order[d]})
            if call.mode.policy != "auto":
                raise refuse(
                    call, f"dim {grown[0]} of size 1 is sharded and would grow", f"redistribute to {target} first"
                )
        layout = target.move_dims([d + added for d in range(len(spec.shape))], len(new))
        sizes = local_shape(layout, new, layout.info.my_coordinate())
        targets = [target, *(s.layout for s in call.inputs[1:])]
        local: Callable[..., Any] = lambda x, *args, **kwargs: x.expand(sizes)  # noqa: E731
        return Solution(targets, [layout], local, uncounted=self.positions(call, self.uncounted), is_view=True)


class Complex(LayoutOp):
    """``view_as_complex`` and ``view_as_real``: the last dim of size 2, real and imaginary parts, is never sharded."""

    summary = OpSummary(
        "every dim but that of the real and imaginary parts",
        pending="passes, of any kind",
        whole="real and imaginary parts on different ranks make no number",
    )

    makes_views = True

    def solve(self, call: Call) -> Solution:
        layout, ndim = call.inputs[0].layout, len(call.inputs[0].shape)
        joins = call.name == "view_as_complex"
        if joins and layout.shard_order[ndim - 1]:
            layout = layout.with_placements(dict.fromkeys(layout.shard_order[ndim - 1], Replicate()))
            if call.mode.policy != "auto":
                raise refuse(
                    call,
                    "the real and imaginary parts are on different ranks",
                    f"redistribute to {layout} first, or use redistribute_policy('auto')",
                )
        new = ndim - 1 if joins else ndim + 1
        return Solution([layout], [layout.move_dims([d if d < new else None for d in range(ndim)], new)], is_view=True)
