"""What a strategy operator lists for one call, and whether the engine really takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hyper_parallel._rules.call import Call, NeedsValue
from hyper_parallel._rules.matching import Row
from hyper_parallel._rules.strategy import StrategyOp
from hyper_parallel.dispatch.arguments import make_call
from hyper_parallel.dispatch.dispatcher import known_rule
from hyper_parallel.sharding.placements import Placement, short
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.testing.inputs import Sample
from hyper_parallel.torch_compat import pytree


class CallRecorder(TorchFunctionMode):
    """Notes the torch functions that are called on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs or {}))):
            self.calls.append((func, tuple(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def strategy_call(self, tensors: Sequence[DTensor]) -> tuple[StrategyOp, Call] | None:
        """The rule and the :class:`Call`, if there was one call, of a StrategyOp, with exactly these tensors."""
        if len(self.calls) != 1:
            return None
        func, args, kwargs = self.calls[0]
        rule = known_rule(func)  # made by the call
        if rule is None or not isinstance(rule.op, StrategyOp):
            return None
        read, named = rule.op.arguments.as_read(func, args, kwargs) or (args, kwargs)
        used = [leaf for leaf in pytree.tree_leaves((read, named)) if isinstance(leaf, torch.Tensor)]
        if len(used) != len(tensors) or any(a is not b for a, b in zip(used, tensors, strict=True)):
            return None
        return rule.op, make_call(rule.op, rule, tuple(read), named)


def rows_of(func: Callable[..., Any], sample: Sample, tensors: Sequence[DTensor]) -> list[Row]:
    """The strategies listed for a sample; none when the function is not one call of a StrategyOp."""
    args, kwargs = sample.arguments(tensors)
    with CallRecorder() as recorder:
        func(*args, **kwargs)
    found = recorder.strategy_call(tensors)
    if found is None:
        return []
    op, call = found
    try:
        return [Row.of(op, call, strategy, op.num_outputs(call)) for strategy in op.strategies(call)]
    except NeedsValue:  # what is decided is another call, with numbers
        return []


def not_taken(recorder: CallRecorder, tensors: Sequence[DTensor], outputs: Sequence[Sequence[Placement]]) -> str | None:
    """Why the engine did not take the strategy that the tensors were laid out for; None when it did.

    Args:
        outputs: per output, the placements that the strategy promises.
    """
    found = recorder.strategy_call(tensors)
    if found is None:
        return None
    op, call = found
    solution = op.solve(call)
    for index, (spec, target) in enumerate(zip(call.inputs, solution.targets, strict=True)):
        if target is not spec.layout:
            return (
                f"the inputs are laid out for a listed strategy, yet input {index} would be redistributed to {target}"
            )
    for index, (layout, wanted) in enumerate(zip(solution.outputs, outputs, strict=True)):
        if layout is None or tuple(layout.placements) != tuple(wanted):
            got = "no DTensor" if layout is None else ",".join(map(short, layout.placements))
            return (
                f"the strategy promises output {index} as {','.join(map(short, wanted))}, the engine gives {got}: "
                "another strategy with the same inputs comes first"
            )
    return None
