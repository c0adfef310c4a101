"""Inputs of which every rank needs all: gathered inside the operator, whose target is whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Replicate
from hyper_parallel.errors import RedistributionError
from hyper_parallel.rules import NOT_VARYING, Call, Solution, is_replicate, map_tensors, transition

__all__ = ["gathered_inside"]


def gathered_inside(call: Call, axes: Mapping[int, Sequence[int]], solve: Callable[[Call], Solution]) -> Solution:
    """What ``solve`` decides when some inputs were whole, for a call in which they are sharded.

    The gradient of a gathered input is a slice: its target is equal on all ranks.

    Args:
        call: whose first input is the target.
        axes: per input the mesh axes over which it is to be gathered; on these the target is whole.
        solve: the rule.
    """
    axes = {i: some for i, some in axes.items() if some}
    if not axes:
        return solve(call)
    whole = copy.copy(call)
    whole.inputs = [
        spec.replace(layout=spec.layout.with_placements(dict.fromkeys(axes.get(i, ()), Replicate())))
        for i, spec in enumerate(call.inputs)
    ]
    try:
        solution = solve(whole)
    except RedistributionError:
        return solve(call)  # which names the layouts that were given
    if not all(is_replicate(t.placements[a]) for t in solution.targets for some in axes.values() for a in some):
        return solve(call)
    # All ranks do the same, with everything that they gathered.
    alike = frozenset(a for some in axes.values() for a in some)
    if call.inplace and call.inputs[0].varying & alike:
        return solve(call)  # a target cannot change its gradient's type
    changes: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
    for i, spec in enumerate(call.inputs):
        wanted, varying = solution.targets[i], spec.varying & alike
        if i in axes:
            solution.targets[i] = _sharded_as(spec.layout, wanted, axes[i])
        if i in axes or varying:
            changes[i] = _transition((solution.targets[i], varying), (wanted, NOT_VARYING), tuple(spec.shape))
    invariant = solution.invariant or [frozenset()] * call.info.ndim
    every = frozenset(range(len(call.inputs)))
    solution.invariant = [every if a in alike else kept for a, kept in enumerate(invariant)]
    func = solution.local or call.func

    def local(*args: Any, **kwargs: Any) -> Any:
        numbers = iter(range(len(call.inputs)))

        def gather(x: torch.Tensor) -> torch.Tensor:
            i = next(numbers)
            return changes[i](x) if i in changes else x

        args = map_tensors(args, gather)
        return func(*args, **{name: map_tensors(value, gather) for name, value in kwargs.items()})

    solution.local = local
    return solution


def _sharded_as(given: Layout, wanted: Layout, axes: Sequence[int]) -> Layout:
    """``wanted`` with these axes as in ``given``, in the order that they have there."""
    placements = tuple(given.placements[a] if a in axes else p for a, p in enumerate(wanted.placements))
    order = tuple(
        (*(a for a in have if a in axes), *want)
        for have, want in zip(given.shard_order, wanted.shard_order, strict=True)
    )
    return given.with_order(placements, order)


def _transition(
    before: tuple[Layout, frozenset[int]], after: tuple[Layout, frozenset[int]], shape: tuple[int, ...]
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: transition(x, before, after, shape)
