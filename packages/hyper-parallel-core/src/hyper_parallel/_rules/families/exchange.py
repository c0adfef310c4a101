"""Elements that change place along a dimension, by a map that every rank knows: ``flip``, ``roll``, ``pad``, slices.

Each rank sends exactly the elements that others ask for, in one all-to-all; nothing when all stay on their rank. The
backward is the transpose of the map: the elements travel back, and what was repeated is summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel._rules.call import Call, Solution
from hyper_parallel._rules.strategy import S, Strategy, StrategyOp
from hyper_parallel.comm import primitives as comm
from hyper_parallel.sharding.layout import Layout, fit_rank
from hyper_parallel.sharding.mesh import AxisGroup
from hyper_parallel.sharding.placements import Partial, Shard
from hyper_parallel.sharding.shard_ranges import Intervals, dim_intervals

__all__ = ["NOTHING", "ExchangePlan", "Moving", "indices_of", "pending_rows", "plain"]

NOTHING = -1
"""In a map: no element, but the fill value."""


def indices_of(intervals: Intervals, device: torch.device | None = None) -> torch.Tensor:
    """The indices of half-open intervals, one after the other: int64."""
    parts = [torch.arange(start, stop, device=device) for start, stop in intervals]
    return parts[0] if len(parts) == 1 else torch.cat([torch.arange(0, device=device), *parts])


class ExchangePlan:
    """Elements along one dimension from where they are to where they are wanted.

    Args:
        group: the ranks among which they travel; None when the dimension is whole on each.
        held: global indices that each member holds, each held once; what nobody holds counts as ``NOTHING``.
        wanted: per member the global index of each element of its result, or ``NOTHING``.
        fill: value of an element that is ``NOTHING``.
    """

    def __init__(
        self, group: AxisGroup | None, held: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], fill: Any = 0
    ) -> None:
        self.group, self.fill = group, fill
        me = 0 if group is None else group.rank
        self.size = len(held[me])
        owner_of = _owners(held)
        owners, positions = zip(*(owner_of(w) for w in wanted), strict=True)
        self.communicates = any(bool(((o != r) & (o >= 0)).any()) for r, o in enumerate(owners))
        # What is asked for more than once travels once.
        asked = [[positions[r][owners[r] == s].unique() for s in range(len(held))] for r in range(len(wanted))]
        nobody = torch.arange(0)
        sends = [asked[r][me] if r != me else nobody for r in range(len(wanted))]
        receives = [asked[me][s] if s != me else nobody for s in range(len(held))]
        self.send_counts, self.receive_counts = [len(s) for s in sends], [len(r) for r in receives]
        self._sends = torch.cat(sends)
        # Where each element of the result lies in [own elements, received ones, the fill value].
        place = torch.where(owners[me] == me, positions[me], self.size + sum(self.receive_counts))
        offset = self.size
        for member, known in enumerate(receives):
            here = owners[me] == member
            if member != me:
                place[here] = offset + torch.searchsorted(known, positions[me][here])
            offset += len(known)
        self._place = place
        self.fills = bool((owners[me] < 0).any())

    @classmethod
    def along(
        cls, layout: Layout, size: int, dim: int, wanted: Callable[[tuple[int, ...]], torch.Tensor], fill: Any = 0
    ) -> ExchangePlan:
        """From ``dim`` (of global length ``size``) of ``layout`` to what the rank at each mesh coordinate wants."""
        axes = tuple(sorted(a for a in layout.shard_order[dim] if layout.mesh_shape[a] > 1))
        group = layout.info.group(axes) if axes else None
        coordinates = [layout.info.my_coordinate()] if group is None else group.coordinates
        sizes = tuple(size if d == dim else 1 for d in range(layout.ndim))
        held = [indices_of(dim_intervals(layout, sizes, dim, c)) for c in coordinates]
        return cls(group, held, [wanted(c) for c in coordinates], fill)

    @classmethod
    def between(
        cls, layout: Layout, size: int, dim: int, result: Layout, result_dim: int, index: torch.Tensor, fill: Any = 0
    ) -> ExchangePlan:
        """From ``dim`` (of global length ``size``) of ``layout`` to ``result_dim`` of ``result``, element ``i`` of
        which is element ``index[i]`` (of an index of two dims its elements, side by side)."""
        sizes = tuple(len(index) if d == result_dim else 1 for d in range(result.ndim))

        def wanted(coordinate: tuple[int, ...]) -> torch.Tensor:
            return index[indices_of(dim_intervals(result, sizes, result_dim, coordinate))].reshape(-1)

        return cls.along(layout, size, dim, wanted, fill)

    def __call__(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The moved elements of ``x`` along ``dim``; differentiable any number of times."""
        return _Moved.apply(x, self, dim, False, self.fill)

    def forth(self, x: torch.Tensor, dim: int, fill: Any) -> torch.Tensor:
        """The moved elements, without autograd."""
        rows = x.movedim(dim, 0)
        parts = [rows]
        if self.communicates:
            sent = rows.index_select(0, self._sends.to(x.device))
            parts.append(self._exchange(sent, self.receive_counts, self.send_counts))
        if self.fills:
            parts.append(rows.new_full((1, *rows.shape[1:]), fill))
        source = torch.cat(parts) if len(parts) > 1 else rows
        return _along(source.index_select(0, self._place.to(x.device)), dim)

    def back(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The transpose of :meth:`forth`, without autograd."""
        rows = x.movedim(dim, 0)
        source = rows.new_zeros((self.size + sum(self.receive_counts) + 1, *rows.shape[1:]))
        source.index_add_(0, self._place.to(x.device), rows)
        own = source[: self.size]
        if self.communicates:
            received = self._exchange(source[self.size : -1], self.send_counts, self.receive_counts)
            own.index_add_(0, self._sends.to(x.device), received)
        return _along(own, dim)

    def _exchange(self, rows: torch.Tensor, out_counts: list[int], in_counts: list[int]) -> torch.Tensor:
        assert self.group is not None
        wide = torch.view_as_real(rows) if rows.is_complex() else rows
        each = math.prod(wide.shape[1:])
        out = wide.new_empty((sum(out_counts), *wide.shape[1:]))
        sizes = [n * each for n in out_counts], [n * each for n in in_counts]
        comm.all_to_all(out.view(-1), wide.reshape(-1), *sizes, self.group)
        return torch.view_as_complex(out) if rows.is_complex() else out


def _along(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """``rows`` along ``dim``, contiguous; no view, as what a Function returns could not be written to then."""
    out = rows.movedim(0, dim).contiguous() if dim else rows
    return out.clone() if out._is_view() else out


class _Moved(torch.autograd.Function):
    """A move, or its transpose; each is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: ExchangePlan, dim: int, back: bool, fill: Any) -> torch.Tensor:
        ctx.args = (move, dim, back)
        return move.back(x, dim) if back else move.forth(x, dim, fill)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        move, dim, back = ctx.args
        return _Moved.apply(grad, move, dim, not back, 0), None, None, None, None


def _owners(held: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Function from global indices to the member that holds each (-1 for none) and the position there."""
    # One more element at the end, which is where the index -1 looks.
    owner = torch.full((max((int(h.max()) for h in held if len(h)), default=-1) + 2,), NOTHING)
    position = torch.zeros_like(owner)
    for member, indices in enumerate(held):
        owner[indices] = member
        position[indices] = torch.arange(len(indices))

    def find(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.where(index < len(owner), index, NOTHING)
        return owner[index], position[index]

    return find


def plain(layout: Layout, dims: Iterable[int]) -> Layout:
    """``layout`` with plain shards on these dims, for a result that was put together anew."""
    axes = {a: Shard(d) for d in dims if d < layout.ndim for a in layout.shard_order[d]}
    return layout.with_order(tuple(axes.get(a, p) for a, p in enumerate(layout.placements)), layout.shard_order)


def pending_rows(call: Call) -> Iterable[Strategy]:
    """All inputs pending alike, for operators that only move elements."""
    kinds = {p for spec in call.inputs for p in spec.layout.placements if isinstance(p, Partial)}
    for pending in sorted(kinds, key=lambda p: p.reduce_op):
        yield Strategy([pending] * len(call.inputs), pending)


class Moving(StrategyOp):
    """One tensor, of some dims of which the elements change place; every dim may stay sharded.

    A subclass says in :meth:`maps` which element comes where. A moved dim that was packed comes out plain.
    """

    def maps(self, call: Call) -> dict[int, torch.Tensor]:
        """For each dim whose elements change place: the index, along that dim, of each element of the result."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define maps")

    def fill(self, call: Call) -> Any:
        """Value of the elements that come from nowhere."""
        return 0

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.inputs[0].shape)):
            yield Strategy([S(d)], S(d))
        if not self.fill(call):
            yield from pending_rows(call)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        target, output = solution.targets[0], solution.outputs[0]
        assert output is not None
        maps = self.maps(call)
        if not any(target.shard_order[d] for d in maps):
            return solution
        output = plain(fit_rank(output, target.ndim), maps)
        shape, fill = tuple(call.inputs[0].shape), self.fill(call)
        moves = [(d, ExchangePlan.between(target, shape[d], d, output, d, index, fill)) for d, index in maps.items()]

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            for d, move in moves:
                x = move(x, d)
            return x

        solution.outputs[0], solution.local = output, local
        return solution
