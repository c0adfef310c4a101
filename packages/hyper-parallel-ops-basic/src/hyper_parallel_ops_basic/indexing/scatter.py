"""Writing elements by index along a dimension: ``index_add``, ``index_copy``, ``scatter``, ``scatter_add`` and so on.

A target that is sharded along that dimension keeps its layout: every rank writes what falls into its piece. Sources
that are sharded along it leave a pending sum where the operation adds. Where target, index and sources are sharded by
the same mesh axes, the sources travel to the ranks that hold their places (:mod:`.exchange`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    ExchangePlan,
    HeldIndices,
    OpSummary,
    P,
    S,
    Solution,
    dim_intervals,
    indices_of,
    is_replicate,
    on_dim,
    overwrite,
)
from hyper_parallel_ops_basic.indexing.exchange import IndexExchange, placed_along
from hyper_parallel_ops_basic.indexing.gathered_inputs import gathered_inside


class _Write(StrategyOp):
    """What the two kinds have in common: ``index`` says where, along ``dim`` of the target, the sources go.

    What may be sharded on a mesh axis:

    - another dim, of the target and all that lies beside it alike: no rank needs anything of another;
    - ``dim``, with index and sources whole: each rank writes what falls into its piece;
    - ``dim``, with index and sources sharded as well: the sources travel to the rank that holds their place;
    - index and sources of a target that is whole: where they are added, not in place, the result is a pending sum;
      otherwise each rank needs all of them, and they are gathered.

    Args:
        adds: whether what is written is added to the target.
        linear: whether a pending sum of target and sources together passes.

    Attributes:
        source: name of the argument that has the sources; None without one.
        beside: names of the arguments that have the target's other dims.
    """

    source: ClassVar[str | None]
    beside: ClassVar[Sequence[str]]

    def __init__(self, op_name: str, *, adds: bool = False, linear: bool = False) -> None:
        super().__init__(op_name)
        self.adds, self.linear = adds, linear

    def source_dim(self, call: Call) -> int | None:
        """The dim of the sources that runs along dim :meth:`index_dim` of the index; None when they do not match."""
        raise NotImplementedError

    def index_dim(self, call: Call) -> int:
        """The dim of the index along which it says the places."""
        raise NotImplementedError

    def is_linear(self, call: Call) -> bool:
        """Whether this call is linear in target and sources together."""
        return self.linear

    def is_adding(self, call: Call) -> bool:
        """Whether this call adds to the target."""
        return self.adds

    @staticmethod
    def places(index: torch.Tensor, size: int) -> torch.Tensor:
        """The index, counted from the front."""
        return index

    def sources(self, call: Call) -> list[str]:
        """The argument with the sources, where it is a tensor."""
        return [self.source] if self.source is not None and call.index(self.source) is not None else []

    def alignments(self, call: Call, targets: Sequence[Layout]) -> list[tuple[str, int, ExchangePlan]]:
        """Of which arguments, and along which other dims, elements have to travel first: each rank needs those beside
        its part of the target."""
        return []

    def strategies(self, call: Call) -> Iterable[Strategy]:
        dim, shape = call.dim("dim"), call.spec("input").shape
        assert dim is not None
        names = [name for name in self.beside if call.index(name) is not None]
        for d in range(len(shape)):
            if d != dim and len({call.spec(name).shape[d] for name in names}) == 1:
                yield Strategy(dict.fromkeys(names, S(d)), S(d))
        if not shape:
            return
        yield Strategy({"input": S(dim)}, S(dim))
        sources = self.sources(call)
        if sources and self.is_linear(call):
            yield Strategy({"input": P} | dict.fromkeys(sources, P), P)
        if (along := self.source_dim(call)) is None:
            return
        if sources and self.is_linear(call) and self.is_adding(call):
            yield Strategy({"input": P, "index": S(self.index_dim(call))} | dict.fromkeys(sources, S(along)), P)
        for have in placed_along(call.spec("input"), dim):
            for spread in placed_along(call.spec("index"), self.index_dim(call)):
                yield Strategy({"input": have, "index": spread} | dict.fromkeys(sources, on_dim(spread, along)), have)

    def solve(self, call: Call) -> Solution:
        target, along, axes = call.inputs[0].layout.placements, self.source_dim(call), {}
        own = [("index", self.index_dim(call)), *((name, along) for name in self.sources(call))]
        for name, d in own:
            order = call.spec(name).layout.shard_order
            if not call.inplace:  # along other dims the target is then cut to fit
                order = () if along is None or d is None or self.is_adding(call) else (order[d],)
            axes[call.position(name)] = [a for some in order for a in some if is_replicate(target[a])]
        return gathered_inside(call, axes, super().solve)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dim, alignments = call.dim("dim"), self.alignments(call, targets)
        assert dim is not None
        is_spread = bool(targets[0].ndim and targets[0].shard_order[dim])
        if not is_spread and not alignments:
            return None
        sources, along, index_dim = self.sources(call), self.source_dim(call) or 0, self.index_dim(call)
        where, shape = call.position("index"), tuple(call.inputs[0].shape)
        held = HeldIndices(targets[0], shape, dim)
        exchange = IndexExchange(targets[0], shape, dim, targets[where], tuple(call.inputs[where].shape))
        func = getattr(torch, call.name.rstrip("_")) if is_spread else call.func
        inplace, arguments, places = call.inplace, self.arguments, self.places

        def write(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = arguments.bind(args, kwargs)
            for name, d, move in alignments:
                bound[name] = move(bound[name], d)
            x, index = bound.pop("input"), places(bound.pop("index"), shape[dim])
            if "src" in bound and not isinstance(bound["src"], torch.Tensor):
                bound["value"] = bound.pop("src")
            if not is_spread:
                return func(x, index=index, **bound)
            if exchange:
                whole = exchange.told(index, index_dim=index_dim)
                needed = exchange.needed(whole, index_dim)
                index = whole.index_select(index_dim, needed[exchange.rank]).to(index.device)
                for name in sources:
                    bound[name] = exchange.bring(bound[name], along, index_dim, needed)

            def written(x: torch.Tensor) -> torch.Tensor:
                return held.write(x, index, lambda piece, at: func(piece, index=at, **bound))

            return overwrite(x, written) if inplace else written(x)

        return write


_SUMMARY = OpSummary(
    "every dim, the written one too; sources along it leave a pending sum where they are added",
    pending="passes through target and source together, where linear",
    communicates=(
        "target, index and sources sharded by one axis: 1 all-gather of indices, 1 all-to-all | 1 all-to-all; "
        "sources of a whole target, in place or not added: 1 all-gather of each | slice"
    ),
)


class IndexWrite(_Write):
    """``index_add``, ``index_copy``, ``index_reduce``: whole rows, by a vector of indices."""

    summary = _SUMMARY
    signature = "input, dim, index, source, reduce, *, alpha=1, include_self=True"
    source: ClassVar[str | None] = "source"
    beside: ClassVar[Sequence[str]] = ("input", "source")

    def index_dim(self, call: Call) -> int:
        return 0

    def source_dim(self, call: Call) -> int | None:
        return call.dim("dim") if call.spec("index").shape and call.spec("source").shape else None


class IndexFill(IndexWrite):
    """``index_fill(input, dim, index, value)``."""

    summary = OpSummary(
        "every dim, the written one too",
        communicates=(
            "target and index sharded by one axis: 1 all-gather of indices; index of a whole target: 1 all-gather of it"
        ),
    )

    signature = "input, dim, index, value"
    source = None
    beside = ("input",)

    def source_dim(self, call: Call) -> int | None:
        return 0 if call.spec("index").shape else None

    @staticmethod
    def places(index: torch.Tensor, size: int) -> torch.Tensor:
        return torch.where(index < 0, index + size, index)  # of its kind only this one takes places from the end


class Scatter(_Write):
    """``scatter``, ``scatter_add``, ``scatter_reduce``: single elements, by a tensor of indices.

    The index may be smaller than target and sources, along another dim too: the rank that holds a part of the target
    needs what goes there.
    """

    summary = replace(
        _SUMMARY,
        communicates=_SUMMARY.communicates
        + "; index or sources of another size than the target's along another sharded dim: 1 all-to-all of each | "
        "1 all-to-all",
    )
    signature = "input, dim, index, src, reduce, *, value, include_self=True"
    source = "src"
    beside = ("input", "index", "src")

    def strategies(self, call: Call) -> Iterable[Strategy]:
        if _writes_nothing(call):
            yield from (Strategy({"input": S(d)}, S(d)) for d in range(len(call.inputs[0].shape)))
            return
        yield from super().strategies(call)
        operands = ["index", *self.sources(call)]
        for d in self._other_sizes(call):  # what is whole has all that any rank needs, what is sharded travels
            for placed in dict.fromkeys([*placed_along(call.spec("input"), d), S(d)]):
                for which in itertools.product((False, True), repeat=len(operands)):
                    rest = dict.fromkeys(itertools.compress(operands, which), S(d))
                    yield Strategy({"input": placed, **rest}, placed)

    def _other_sizes(self, call: Call) -> list[int]:
        """The dims, other than the written one, along which index or sources have another size than the target."""
        if _writes_nothing(call):
            return []
        shape, names = call.inputs[0].shape, ["index", *self.sources(call)]
        is_alike = [all(call.spec(name).shape[d] == size for name in names) for d, size in enumerate(shape)]
        return [d for d, alike in enumerate(is_alike) if not alike and d != call.dim("dim")]

    def alignments(self, call: Call, targets: Sequence[Layout]) -> list[tuple[str, int, ExchangePlan]]:
        target, whole, size = targets[0], tuple(call.inputs[0].shape), call.spec("index").shape
        found = []
        for d in self._other_sizes(call):
            for name in ["index", *self.sources(call)] if target.shard_order[d] else []:
                layout, given = targets[call.position(name)], call.spec(name).shape[d]
                found.append((name, d, ExchangePlan.along(layout, given, d, _below(size[d], target, whole, d))))
        return found

    def index_dim(self, call: Call) -> int:
        dim = call.dim("dim")
        assert dim is not None
        return dim

    def source_dim(self, call: Call) -> int | None:
        dim, index = self.index_dim(call), call.spec("index").shape
        fits = dim < len(index) and all(call.spec(name).shape[dim] == index[dim] for name in self.sources(call))
        return dim if fits else None

    def is_linear(self, call: Call) -> bool:
        reduce = call.arg("reduce")
        return self.linear and (reduce is None or (reduce in ("sum", "add") and bool(call.arg("include_self", True))))

    def is_adding(self, call: Call) -> bool:
        return self.adds or call.arg("reduce") in ("sum", "add")


def _below(size: int, layout: Layout, shape: tuple[int, ...], dim: int) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Function that gives the indices below ``size``, along ``dim``, that the rank at a coordinate holds."""

    def held(coordinate: tuple[int, ...]) -> torch.Tensor:
        indices = indices_of(dim_intervals(layout, shape, dim, coordinate))
        return indices[indices < size]

    return held


def _writes_nothing(call: Call) -> bool:
    """Whether the index is empty, and so may have other dims than the target."""
    index = call.spec("index").shape
    return 0 in index and len(index) != len(call.inputs[0].shape)
