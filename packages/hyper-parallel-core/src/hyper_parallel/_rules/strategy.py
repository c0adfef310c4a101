"""Strategies: an operator's mathematics as a list of legal placements for one mesh axis.

    class IndexAdd(StrategyOp):
        signature = "input, dim, index, source, *, alpha=1"

        def strategies(self, call):
            dim = call.dim("dim")
            for d in range(call.inputs[0].layout.ndim):
                if d != dim:
                    yield Strategy({"input": S(d), "source": S(d)}, S(d))      # other dims may be sharded alike
            yield Strategy({"input": P, "source": P}, P)                        # linear
            yield Strategy({"input": P, "index": S(0), "source": S(dim)}, P)    # sharded sources leave a pending sum

Inputs that a row does not name are Replicate, and "everything Replicate" is always legal. How the rows of a call are
matched with its inputs: :mod:`hyper_parallel._rules.matching`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel import _wiring
from hyper_parallel._rules.call import Call, Signature, Solution
from hyper_parallel._rules.matching import StrategyRows, match
from hyper_parallel._rules.op import DistributedOp
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial, Placement, Replicate, Shard

__all__ = ["LayoutOp", "P", "R", "S", "Strategy", "StrategyOp"]

R = Replicate()
P = Partial("sum")
_SHARDS = tuple(Shard(d) for d in range(16))


def S(dim: int) -> Shard:
    """``Shard(dim)``, shared."""
    return _SHARDS[dim] if 0 <= dim < 16 else Shard(dim)


@dataclass(frozen=True)
class Strategy:
    """One legal combination of placements on one mesh axis.

    Attributes:
        inputs: placement of each tensor input, by position or by name; what is left out is Replicate.
        outputs: placement of the output, or one per output.
        invariant: inputs (as in ``inputs``) used only after the operator's own reduction, which therefore keep a whole
            gradient on every rank.
    """

    inputs: Sequence[Placement] | Mapping[str, Placement]
    outputs: Placement | Sequence[Placement]
    invariant: Sequence[int | str] = ()


class LayoutOp(DistributedOp):
    """A rule that decides from a :class:`~hyper_parallel.rules.Call`; :meth:`solve` is all that a subclass writes.

    Attributes:
        signature: parameter names, when the rule reads arguments by name.
        arguments: the signature, with which a local function reads its own: ``self.arguments.bind(args, kwargs)``.
        scalars_matter: whether an int argument (beyond its type) can change a layout. False lets ``x * 3`` and ``x *
            4`` share a cache entry.
        floats_matter: whether a float argument can change one too (the order of a norm). A rule that reads a float
            while this is False must read it from the local arguments.
        uncounted: names or positions of tensor inputs read only for dtype, device or shape.
        makes_views: whether the result may share memory with the first input.
        carries_writes: whether :meth:`carry_write` is defined.
    """

    signature: str | None = None
    scalars_matter: bool = True
    floats_matter: bool = False
    uncounted: Sequence[int | str] = ()
    makes_views: bool = False
    carries_writes: bool = False
    cache_expand = True

    def __init__(self, op_name: str, **params: Any) -> None:
        super().__init__(op_name, **params)
        self.arguments = Signature(self.signature or "")

    def carry_write(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], position: int, value: Any
    ) -> None:
        """Write ``value``, the result number ``position`` of ``func(*args, **kwargs)``, to the part of the first
        argument that it shows. Called after a write to a result that is a copy where one device has a view, when
        ``carries_writes`` is true; such a write is refused otherwise."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define carry_write")

    def solve(self, call: Call) -> Solution:
        """Targets of the inputs and layouts of the outputs.

        Raises:
            RedistributionError: when the inputs do not fit and the policy allows no way out.
        """
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define solve")

    # -- the three phases, as the dispatcher inlines them -----------------------------------------------------------

    def preprocess(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Local arguments, and the :class:`Call` as the only cache value."""
        local_args, local_kwargs, _ = super().preprocess(args, kwargs)
        return local_args, local_kwargs, (_wiring.call_of(self, tuple(args), kwargs),)

    def infer_layout(self, cache_values: Any) -> tuple[tuple[Any, ...], Any]:
        """Output layouts and the :class:`~hyper_parallel._rules.call.Solution`."""
        solution = self.solve(cache_values[0])
        return tuple(solution.outputs), solution

    def get_expand_impl(
        self, func: Callable[..., Any], infer_result: Any, cache_values: Any
    ) -> Callable[..., Any] | None:
        """The solution's local function."""
        return infer_result[1].local

    def positions(self, call: Call, names: Iterable[int | str]) -> frozenset[int]:
        """Input positions of names or positions; absent ones are left out."""
        found = (n if isinstance(n, int) else call.index(n) for n in names)
        return frozenset(p for p in found if p is not None)


class StrategyOp(LayoutOp):
    """A rule given by strategies."""

    def strategies(self, call: Call) -> Iterable[Strategy]:
        """The legal combinations for one mesh axis, in order of preference among equally cheap ones."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define strategies")

    def num_outputs(self, call: Call) -> int:
        """How many tensors the operator returns."""
        return 1

    def output_shapes(self, call: Call) -> Sequence[tuple[int, ...]] | None:
        """Global shape of each output, where that is cheaper to say than to run the function on meta tensors."""
        return None

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        """What runs on the local tensors, when the function itself is not right there: local sizes in the arguments, or
        communication inside."""
        return None

    def solve(self, call: Call) -> Solution:
        """Match the strategies per mesh axis, then jointly."""
        return self.solve_by(call, self.strategies(call))

    def solve_by(self, call: Call, strategies: Iterable[Strategy]) -> Solution:
        """The solution by these strategies, for a rule that has to look at it before it decides."""
        count = self.num_outputs(call)
        shapes = self.output_shapes(call)
        largest = 0 if shapes is None else max(math.prod(shape) for shape in shapes)
        chosen, targets, outputs = match(call, StrategyRows(self, call, strategies, count), count, largest)
        solution = Solution(
            targets,
            list(outputs),
            invariant=[row.invariant for row in chosen],
            uncounted=self.positions(call, self.uncounted),
            shapes=shapes,
        )
        solution.local = self.local_function(call, targets, outputs)
        return solution
