"""Cases drawn by hypothesis: which are tried, and the smallest that still fails.

Hypothesis draws, the ranks run many cases in one call; only when one fails does it run them one by one, to shrink. The
same cases are drawn on every run, and nothing is stored.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.sharding.placements import PackedShard, Placement, Replicate, Shard, on_dim
from hyper_parallel.testing.layouts import Case, Placed, axis_placements, tensor_placements

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

SHRINK_SECONDS = 30.0
"""After this time the smallest failing case so far is reported."""
TRIES = 200
"""Cases among which a failing one is looked for, to shrink it."""


@dataclass(frozen=True)
class InputSpace:
    """What the layouts of a call's tensor inputs depend on, one entry per input each.

    Attributes:
        shapes: global shapes.
        pending: whether a pending sum is possible.
        wants_grad: whether gradients are checked.
        mesh_ndim: number of mesh axes.
    """

    shapes: tuple[tuple[int, ...], ...]
    pending: tuple[bool, ...]
    wants_grad: tuple[bool, ...]
    mesh_ndim: int

    def options(self) -> list[list[Placed]]:
        """All layouts of each input, the plain ones first."""
        return [tensor_placements(s, self.mesh_ndim, p) for s, p in zip(self.shapes, self.pending, strict=True)]

    def cases(self, limit: int, seed: str) -> list[Case]:
        """At most ``limit`` cases; every combination of layouts when there are no more than that."""
        options = self.options()
        if math.prod(map(len, options)) > limit:
            return drawn(self.strategy(), limit, seed)
        rng = random.Random(seed)  # of what is no layout
        found = []
        for combination in itertools.product(*options):
            wanted = [w and rng.random() < 0.75 for w in self.wants_grad]
            found.append(Case(tuple(_entered(one, w, rng.random) for one, w in zip(combination, wanted, strict=True))))
        return found

    def sharded_cases(self) -> list[Case]:
        """One case per dim of the first input that can be cut, sharded over the first mesh axis."""
        options = self.options()
        found = []
        for dim, size in enumerate(self.shapes[0] if self.shapes else ()):
            if size > 1:
                first = Placed((Shard(dim), *[Replicate()] * (self.mesh_ndim - 1)))
                others = zip(self.shapes, options, strict=True)
                placed = [_counterpart(first, self.shapes[0], shape, some) for shape, some in others]
                entered = (replace(one, grad=w) for one, w in zip(placed, self.wants_grad, strict=True))
                found.append(Case(tuple(entered)))
        return found

    def strategy(self) -> SearchStrategy[Case]:
        """Cases as hypothesis draws them: one input sharded, all inputs laid out alike, or each at random."""
        from hypothesis import strategies as st

        count = len(self.shapes)
        single = [axis_placements(s, p) for s, p in zip(self.shapes, self.pending, strict=True)]
        options = self.options()
        # Axis by axis, as each shrinks on its own; the swapped order of two axes on one dim last.
        layouts = [st.tuples(*[st.sampled_from(some)] * self.mesh_ndim, st.booleans()) for some in single]

        @st.composite
        def case(draw: DrawFn) -> Case:
            kind = draw(st.integers(0, 2)) if count > 1 else 2
            index = draw(st.integers(0, count - 1))  # always, as hypothesis prefers what takes fewer draws
            if kind == 0:
                chosen = [some[0] for some in options]
                chosen[index] = _layout(*draw(layouts[index]))
            elif kind == 1:
                first = _layout(*draw(layouts[0]))
                chosen = [
                    _counterpart(first, self.shapes[0], shape, some)
                    for shape, some in zip(self.shapes, options, strict=True)
                ]
            else:
                chosen = [_layout(*draw(some)) for some in layouts]
            # Drawn together, as each draw costs; zeros are the plain case.
            size = count * (2 + self.mesh_ndim)
            flags = draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))
            numbers = iter(flags)

            def chance() -> float:
                return 1 - next(numbers) / 100

            some_grads = [wants and chance() < 0.75 for wants in self.wants_grad]
            entered = [_entered(one, wants, chance) for one, wants in zip(chosen, some_grads, strict=True)]
            return Case(tuple(entered))

        return case()


def _layout(*drawn: Any) -> Placed:
    """A layout from a placement per axis and whether to swap, made possible where it is not."""
    placements, swap = list(drawn[:-1]), drawn[-1]
    sharded = [p for p in placements if isinstance(p, Shard)]
    same_dim = len(sharded) == 2 and sharded[0].dim == sharded[1].dim
    packed = sum(isinstance(p, PackedShard) for p in sharded)
    if same_dim and packed == 2:  # only the outermost shard of a dim can be packed
        placements[0] = Replicate()
    return Placed(tuple(placements), swapped=swap and same_dim and not packed)


def _entered(one: Placed, grad: bool, chance: Callable[[], float]) -> Placed:
    """A layout with what else there is about an input: sometimes varying, sometimes with transposed memory."""
    replicated = [a for a, p in enumerate(one.placements) if isinstance(p, Replicate)]
    varying = tuple(a for a in replicated if grad and chance() < 0.15)
    return Placed(one.placements, one.swapped, grad, varying, transposed=chance() < 0.2)


def _counterpart(first: Placed, shape: Sequence[int], other: Sequence[int], options: Sequence[Placed]) -> Placed:
    """The layout of another operand that goes with ``first``, with dims aligned from the right as they broadcast."""

    def moved(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        dim = placement.dim - len(shape) + len(other)
        return on_dim(placement, dim) if dim >= 0 and other[dim] == shape[placement.dim] else Replicate()

    wanted = Placed(tuple(map(moved, first.placements)), first.swapped)
    return wanted if wanted in options else options[0]


def drawn(strategy: SearchStrategy[Case], count: int, seed: str) -> list[Case]:
    """Up to ``count`` different cases, the same for the same seed."""
    found: dict[Case, None] = {}

    def enough(case: Case) -> bool:
        found.setdefault(case)
        return len(found) == count

    _search(strategy, enough, 3 * count, seed, shrink=False)
    return list(found)


def smallest(strategy: SearchStrategy[Case], fails: Callable[[Case], bool], seed: str) -> Case | None:
    """The smallest case that fails; None when none was found.

    Args:
        fails: runs a case; asked once for each.
    """
    known: dict[Case, bool] = {}
    deadline = time.monotonic() + SHRINK_SECONDS

    def failing(case: Case) -> bool:
        if case not in known:
            known[case] = time.monotonic() < deadline and fails(case)
        return known[case]

    return _search(strategy, failing, TRIES, seed, shrink=True)


def _search(
    strategy: SearchStrategy[Case], condition: Callable[[Case], bool], tries: int, seed: str, *, shrink: bool
) -> Case | None:
    hypothesis = _hypothesis()
    from hypothesis.errors import NoSuchExample

    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    settings = hypothesis.settings(
        max_examples=tries,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=phases if shrink else phases[:1],
    )
    try:
        case: Case = hypothesis.find(strategy, condition, settings=settings, random=random.Random(seed))
    except NoSuchExample:
        return None
    return case


def _hypothesis() -> Any:
    try:
        import hypothesis
    except ImportError:
        raise RuntimeError(
            "the conformance kit draws layouts with hypothesis, which is not installed: "
            "pip install 'hyper-parallel-core[testing]'"
        ) from None
    return hypothesis
