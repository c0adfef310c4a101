"""Writing elements by index along a dimension: ``index_add``, ``index_copy``, ``scatter``, ``scatter_add`` and so on.

A target that is sharded along that dimension keeps its layout: every rank writes what falls into its piece. Sources
that are sharded along it leave a pending sum where the operation adds. Where target, index and sources are sharded by
the same mesh axes, the sources travel to the ranks that hold their places (:mod:`.exchanging`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.call import Call, Solution
from hyper_parallel.families.held_indices import HeldIndices
from hyper_parallel.families.overwriting import overwrite
from hyper_parallel.layout import Layout
from hyper_parallel.op import OpSummary
from hyper_parallel.placements import Placement, is_replicate
from hyper_parallel.strategy import P, S, Strategy, StrategyOp

from .exchanging import Exchange, any_packed
from .gathered_inputs import gathered_inside


class _Write(StrategyOp):
    """What the two kinds have in common.

    Args:
        adds: whether what is written is added to the target.
        linear: whether a pending sum of target and source passes.
    """

    def __init__(self, op_name: str, *, adds: bool = False, linear: bool = False) -> None:
        super().__init__(op_name)
        self.adds, self.linear = adds, linear

    source: str

    def strategies(self, call: Call) -> Iterable[Strategy]:
        dim, source = call.dim("dim"), self.source if call.index(self.source) is not None else None
        assert dim is not None
        for d in range(len(call.spec("input").shape)):
            if d != dim:
                row = self.other_dim(call, d, source)
                if row is not None:
                    yield Strategy(row, S(d))
        if not call.spec("input").shape:
            return
        yield Strategy({"input": S(dim)}, S(dim))
        along = self.along(call)
        if source is not None and self.is_linear(call):
            yield Strategy({"input": P, source: P}, P)
            if self.is_adding(call) and along is not None:
                yield Strategy({"input": P, "index": S(along[0]), source: S(along[1])}, P)
        if along is not None and not any_packed(call, "input", "index", self.source):
            sources: dict[str, Placement] = {} if source is None else {source: S(along[1])}
            yield Strategy({"input": S(dim), "index": S(along[0])} | sources, S(dim))

    def is_linear(self, call: Call) -> bool:
        """Whether this call is linear in target and source together."""
        return self.linear

    def is_adding(self, call: Call) -> bool:
        """Whether this call adds to the target."""
        return self.adds

    def other_dim(self, call: Call, d: int, source: str | None) -> dict[str, Placement] | None:
        """Placements when another dim than the written one is sharded."""
        raise NotImplementedError

    def along(self, call: Call) -> tuple[int, int] | None:
        """The dims of index and source that run along the written dim; None when they do not match."""
        raise NotImplementedError

    def solve(self, call: Call) -> Solution:
        target, along = call.inputs[0].layout.placements, self.along(call)
        pending = self.is_adding(call) and not call.inplace  # then sources stay, and leave a pending sum
        axes = {}
        if along is not None and not pending:
            for name, d in zip(("index", self.source), along, strict=True):
                if (i := call.index(name)) is not None:
                    axes[i] = [a for a in call.inputs[i].layout.shard_order[d] if is_replicate(target[a])]
        return gathered_inside(call, axes, super().solve)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        dim = call.dim("dim")
        assert dim is not None
        if not targets[0].ndim or not targets[0].shard_order[dim]:
            return None
        source = self.source if call.index(self.source) is not None else None
        index_dim, source_dim = self.along(call) or (0, 0)
        where = call.position("index")
        shape, index_shape = tuple(call.inputs[0].shape), tuple(call.inputs[where].shape)
        held, exchange = (
            HeldIndices(targets[0], shape, dim),
            Exchange(targets[0], shape, dim, targets[where], index_shape),
        )
        func = getattr(torch, call.name.rstrip("_"))
        inplace, arguments = call.inplace, self.arguments

        def write(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = arguments.bind(args, kwargs)
            x, index = bound.pop("input"), bound.pop("index")
            if "src" in bound and not isinstance(bound["src"], torch.Tensor):
                bound["value"] = bound.pop("src")
            if exchange:
                whole = exchange.told(index, index_dim=index_dim)
                needed = exchange.needed(whole, index_dim)
                index = whole.index_select(index_dim, needed[exchange.rank]).to(index.device)
                if source is not None:
                    bound[source] = exchange.bring(bound[source], source_dim, index_dim, needed)

            def written(x: torch.Tensor) -> torch.Tensor:
                return held.write(x, index, lambda piece, at: func(piece, index=at, **bound))

            return overwrite(x, written) if inplace else written(x)

        return write


class IndexWrite(_Write):
    """``index_add``, ``index_copy``, ``index_fill``, ``index_reduce``: whole rows, by a vector of indices."""

    summary = OpSummary(
        "every dim, the written one too; sources along it leave a pending sum where they are added",
        pending="passes through target and source together, where linear",
        communicates=(
            "target, index and sources sharded by one axis: 1 all-gather of indices, 1 all-to-all | 1 all-to-all; "
            "sources of a whole target, in place or not added: 1 all-gather of each | slice"
        ),
    )

    signature = "input, dim, index, source, reduce, *, alpha=1, include_self=True"
    source = "source"

    def other_dim(self, call: Call, d: int, source: str | None) -> dict[str, Placement] | None:
        return {"input": S(d), source: S(d)} if source else {"input": S(d)}

    def along(self, call: Call) -> tuple[int, int] | None:
        dim = call.dim("dim")
        assert dim is not None
        if not call.spec("index").shape or (call.index("source") is not None and not call.spec("source").shape):
            return None
        return 0, dim


class IndexFill(IndexWrite):
    """``index_fill(input, dim, index, value)``."""

    summary = OpSummary(
        "every dim, the written one too",
    )

    signature = "input, dim, index, value"
    source = "value"

    def other_dim(self, call: Call, d: int, source: str | None) -> dict[str, Placement] | None:
        return {"input": S(d)}

    def along(self, call: Call) -> tuple[int, int] | None:
        return super().along(call) if call.index("value") is None else None


class Scatter(_Write):
    """``scatter``, ``scatter_add``, ``scatter_reduce``: single elements, by a tensor of indices."""

    summary = OpSummary(
        "every dim, the written one too; sources along it leave a pending sum where they are added",
        pending="passes through target and source together, where linear",
        communicates=(
            "target, index and sources sharded by one axis: 1 all-gather of indices, 1 all-to-all | 1 all-to-all; "
            "sources of a whole target, in place or not added: 1 all-gather of each | slice"
        ),
    )

    signature = "input, dim, index, src, reduce, *, value, include_self=True"
    source = "src"

    def other_dim(self, call: Call, d: int, source: str | None) -> dict[str, Placement] | None:
        names = ["input", "index", *([source] if source else [])]
        if len({call.spec(name).shape[d] for name in names}) > 1:
            return None
        return {name: S(d) for name in names}

    def along(self, call: Call) -> tuple[int, int] | None:
        dim = call.dim("dim")
        assert dim is not None
        if not call.spec("index").shape:
            return None
        other = call.index("src")
        return (dim, dim) if other is None or call.inputs[other].shape[dim] == call.spec("index").shape[dim] else None

    def is_linear(self, call: Call) -> bool:
        reduce = call.arg("reduce")
        return self.linear and (reduce is None or (reduce in ("sum", "add") and bool(call.arg("include_self", True))))

    def is_adding(self, call: Call) -> bool:
        return self.adds or call.arg("reduce") in ("sum", "add")
