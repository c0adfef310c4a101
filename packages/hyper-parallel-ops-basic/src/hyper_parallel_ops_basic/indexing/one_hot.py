"""``F.one_hot``: without ``num_classes`` it is one more than the largest class on any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import DTensor, Replicate, Strategy, StrategyOp
from hyper_parallel.rules import Call, FunctionOp, OpSummary, S, Solution, dispatch, local_of, primitives


def one_hot_of(ids: torch.Tensor, num_classes: int) -> torch.Tensor:
    """``F.one_hot`` with the number of classes known."""
    return torch.nn.functional.one_hot(ids, num_classes)


class OneHot(FunctionOp):
    """``F.one_hot(tensor, num_classes)``; inferring the classes of a sharded tensor all-reduces one number."""

    summary = OpSummary(
        "every dim",
        pending="reduced first",
        communicates="classes inferred from sharded ids: 1 all-reduce of a number",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        ids = args[0] if args else kwargs["tensor" if "tensor" in kwargs else "input"]
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        if ids.layout.is_partial():
            ids = ids.reduce_partial()
        return dispatch(one_hot_of, (ids, number_of_classes(ids) if classes == -1 else classes), {})


def number_of_classes(ids: DTensor) -> int:
    """One more than the largest id of the whole tensor. Collective over the axes that shard it.

    Raises:
        RuntimeError: for an empty tensor.
    """
    if not ids.numel():
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    local, layout = local_of(ids), ids.layout
    largest = local.max().long() if local.numel() else torch.full((), -1, device=local.device)
    axes = tuple(a for a, p in enumerate(layout.placements) if not isinstance(p, Replicate))
    if axes:
        primitives.all_reduce(largest, layout.info.group(axes), "max")
    return int(largest) + 1


class OneHotOf(StrategyOp):
    """:func:`one_hot_of`."""

    summary = OpSummary(
        "every dim",
    )

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.inputs[0].shape)):
            yield Strategy([S(d)], S(d))

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        # On meta tensors PyTorch keeps the order of the ids' dims in memory, elsewhere not.
        solution.meta = lambda ids, classes: ids.new_empty((*ids.shape, classes))
        return solution
