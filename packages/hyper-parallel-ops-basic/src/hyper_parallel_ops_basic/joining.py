"""Several tensors into one: ``cat``, ``stack``, ``vstack``, ``hstack``.

Concatenating tensors along the dimension that one mesh axis shards needs no communication: each rank joins its pieces,
which is what a :class:`~hyper_parallel.placements.PackedShard` with one section per tensor says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hyper_parallel.call import Call, normal_dim
from hyper_parallel.families.moving import pending_rows
from hyper_parallel.op import OpSummary
from hyper_parallel.placements import PackedShard, Placement
from hyper_parallel.strategy import R, S, Strategy, StrategyOp


def packed_or_plain(dim: int, sections: Sequence[int]) -> Placement:
    """The shard of ``dim`` whose sections are sharded each on its own; plain when only one is not empty."""
    filled = tuple(n for n in sections if n)
    return PackedShard(dim, filled) if len(filled) > 1 else S(dim)


class Cat(StrategyOp):
    """``cat(tensors, dim)``.

    Args:
        at_least: rank to which smaller tensors are raised first, with the new dims in front (2 for ``vstack``).
        dim: dimension, for a function that has no argument for it.
    """

    summary = OpSummary(
        "every dim, operands alike; the joined one, on one axis, becomes `PackedShard`",
        pending="passes when all are pending alike",
        whole="a joined dim that several axes shard",
    )

    signature = "tensors, dim=0, *, axis"

    def __init__(self, op_name: str, *, at_least: int = 1, dim: int | None = None) -> None:
        super().__init__(op_name)
        self.at_least, self.fixed = at_least, dim

    def strategies(self, call: Call) -> Iterable[Strategy]:
        shapes = [spec.shape for spec in call.inputs]
        # A tensor of shape (0,) joins tensors of any rank.
        joined = [i for i, shape in enumerate(shapes) if tuple(shape) != (0,) or self.at_least > 1] or list(
            range(len(shapes))
        )
        ndim = max(self.at_least, max(len(shapes[i]) for i in joined))
        given = call.arg("dim", call.arg("axis", 0)) if self.fixed is None else min(self.fixed, ndim - 1)
        dim = normal_dim(given, ndim)
        for d in range(ndim):
            inputs: list[Placement] = [R] * len(shapes)
            for i in joined:
                own = d - (ndim - len(shapes[i]))
                if own >= 0:
                    inputs[i] = S(own)
            if any(p == R for i, p in enumerate(inputs) if i in joined):
                continue
            if d != dim:
                yield Strategy(inputs, S(d))
            elif self._one_plain_axis(call, inputs):
                sizes = [shapes[i][inputs[i].dim] for i in joined]  # type: ignore[attr-defined]
                yield Strategy(inputs, packed_or_plain(dim, sizes))
        yield from pending_rows(call)

    @staticmethod
    def _one_plain_axis(call: Call, inputs: Sequence[Placement]) -> bool:
        """Whether only one mesh axis shards the joined dimension, and not as PackedShard."""
        axes: set[int] = set()
        for spec, placement in zip(call.inputs, inputs, strict=True):
            if placement != R:
                axes.update(spec.layout.shard_order[placement.dim])  # type: ignore[attr-defined]
        kinds = {type(spec.layout.placements[a]) for spec in call.inputs for a in axes}
        return len(axes) == 1 and PackedShard not in kinds


class HStack(Cat):
    """``hstack``: along dim 1, or dim 0 of vectors."""

    summary = OpSummary(
        "as `cat`",
        pending="passes when all are pending alike",
    )

    def __init__(self, op_name: str) -> None:
        super().__init__(op_name, at_least=1, dim=1)


class Stack(StrategyOp):
    """``stack(tensors, dim)``: tensors of one shape along a new dimension."""

    summary = OpSummary(
        "every dim, operands alike",
        pending="passes when all are pending alike",
    )

    signature = "tensors, dim=0, *, axis"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ndim = len(call.inputs[0].shape)
        dim = normal_dim(call.arg("dim", call.arg("axis", 0)), ndim + 1)
        for d in range(ndim):
            yield Strategy([S(d)] * len(call.inputs), S(d + (d >= dim)))
        yield from pending_rows(call)
