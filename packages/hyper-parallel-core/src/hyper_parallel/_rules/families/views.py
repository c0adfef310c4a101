"""Operators that only rearrange: reshaping by sizes, and renaming of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Solution, normal_dim, refuse
from hyper_parallel._rules.families.held_indices import one_row_more, pending_lookup
from hyper_parallel._rules.families.reshaping import reshaped_layout
from hyper_parallel._rules.op import OpSummary
from hyper_parallel._rules.strategy import LayoutOp
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Replicate, is_partial
from hyper_parallel.sharding.shard_ranges import local_shape


class Reshape(LayoutOp):
    """Reshape by global sizes: ``reshape``, ``flatten``, ``unflatten``, ``squeeze``, ``unsqueeze``,
    ``view_as``.

    The output shape is that of the function on meta tensors. Shards follow their elements
    (:mod:`hyper_parallel._rules.families.reshaping`). Pending reductions pass.
    """

    summary = OpSummary(
        "every dim whose shards fall on bounds of the new dims (a flattened inner dim becomes `PackedShard`); one of "
        "size 1 that vanishes leaves a pending sum (bool: max)",
        pending="passes, of any kind",
        whole="shards that fall between bounds of the new dims: no layout describes the result",
    )

    signature = "input"

    # view_as and reshape_as read only the shape of the second tensor.
    uncounted = (1,)
    makes_views = True

    carries_writes = True

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        args[0].copy_(value.reshape(args[0].shape))

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        (new,) = call.output_shapes()
        layout, target = reshaped_layout(spec.layout, tuple(spec.shape), new, pending_lookup(spec.dtype))
        if target is not spec.layout and call.mode.policy != "auto":
            raise refuse(
                call,
                f"shape {tuple(spec.shape)} to {new}: the shards do not fall on boundaries of the new dimensions",
                f"redistribute to {target} first, or use redistribute_policy('auto')",
            )
        sizes = local_shape(layout, new, layout.info.my_coordinate())
        # A view or a copy as on one device, which the strides of the global tensor decide: those of a piece may differ.
        is_view = is_alias(call.meta_result(), spec.meta)
        local = _view_as_sizes(sizes) if is_view else _copy_of_sizes(sizes)
        return _with_ones_held(self, call, target, layout, local, is_view)


class View(Reshape):
    """``view`` by sizes, or as another dtype: each rank views its bits, those of a pending sum once reduced."""

    summary = OpSummary(
        "as `reshape`; every dim where the bits are viewed as another dtype",
        pending="passes, of any kind; reduced before it is viewed as another dtype",
        whole="shards that fall between bounds of the new dims: no layout describes the result; the last dim viewed as "
        "a dtype of another size: it has another number of elements",
    )

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        given = args[0].dtype
        super().carry_write(func, args, kwargs, position, value if value.dtype is given else value.view(given))

    def solve(self, call: Call) -> Solution:
        (dtype,) = [*call.args[1:2], *call.kwargs.values()] or [None]
        if not isinstance(dtype, torch.dtype):
            return super().solve(call)
        spec = call.inputs[0]
        gathered = spec.layout.shard_order[-1] if dtype.itemsize != spec.dtype.itemsize and spec.shape else ()
        pending = [a for a, p in enumerate(spec.layout.placements) if is_partial(p)]
        layout = spec.layout.with_placements(dict.fromkeys([*gathered, *pending], Replicate()))
        if gathered and call.mode.policy != "auto":
            raise refuse(
                call,
                f"the last dim is sharded, and viewed as {dtype} it has another number of elements",
                f"redistribute to {layout} first, or use redistribute_policy('auto')",
            )
        return Solution([layout], [layout], is_view=True)


def is_alias(result: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a result on meta tensors is its source or a view of it."""
    return result is source or result._base is source


def _with_ones_held(
    op: LayoutOp, call: Call, target: Layout, output: Layout, local: Callable[..., Any], is_view: bool
) -> Solution:
    """The solution of an operator whose result is pending where the shard of a dim of size 1 had no place in it: ranks
    without the elements have zeros, and so the result is no view."""
    vanished = [d for d, axes in enumerate(target.shard_order) if any(is_partial(output.placements[a]) for a in axes)]

    def held(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for d in vanished:
            x = x if x.shape[d] else one_row_more(x, d)
        return local(x.clone())  # where there are elements too, so that a write is one to a copy on every rank

    return Solution(
        [target, *(spec.layout for spec in call.inputs[1:])],
        [output],
        held if vanished else local,
        uncounted=op.positions(call, op.uncounted),
        is_view=is_view,
        copies=is_view and bool(vanished),
    )


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
    kind = "axis" if call.name.startswith("swapaxes") else "dim"
    a, b = (normal_dim(d, ndim) for d in _arguments(call, f"{kind}0", f"{kind}1"))
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
        "every dim; one of size 1 that grows leaves a pending sum (bool: max)",
        pending="passes, of any kind",
    )

    signature = "input"

    uncounted = (1,)
    makes_views = True

    def solve(self, call: Call) -> Solution:
        spec = call.inputs[0]
        (new,) = call.output_shapes()
        added = len(new) - len(spec.shape)
        grown = {a for d, n in enumerate(spec.shape) if n != new[d + added] for a in spec.layout.shard_order[d]}
        layout = spec.layout.with_placements(dict.fromkeys(grown, pending_lookup(spec.dtype)))
        layout = layout.move_dims([d + added for d in range(len(spec.shape))], len(new))
        sizes = local_shape(layout, new, layout.info.my_coordinate())
        return _with_ones_held(self, call, spec.layout, layout, lambda x, *args, **kwargs: x.expand(sizes), True)


class Complex(LayoutOp):
    """``view_as_complex`` and ``view_as_real``: the last dim of size 2, real and imaginary parts, is never sharded."""

    summary = OpSummary(
        "every dim but that of the real and imaginary parts",
        pending="passes, of any kind",
        whole="real and imaginary parts on different ranks make no number",
    )

    makes_views = True

    carries_writes = True

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        args[0].copy_(torch.view_as_real(value))  # view_as_real is a view always

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
