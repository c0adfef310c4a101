"""Native halves of functions of ``torch.nn.functional``, and copies of views: other names for what has a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.rules import FunctionOp, OpSummary, Signature

_REDUCTIONS = ("none", "mean", "sum")


class Namesake(FunctionOp):
    """A native function that takes the arguments of one of ``torch.nn.functional`` in another order.

    Args:
        signature: the parameters of the native function by the names that the other has; beside them ``cudnn_enabled``,
            which only chooses a kernel. A reduction is a number there, and none when it is not given.
        function: name of the other function, where it is not the same.
    """

    summary = OpSummary(
        "as its namesake in `torch.nn.functional`",
        pending="as its namesake",
        communicates="that of its namesake",
    )

    def __init__(self, op_name: str, *, signature: str, function: str = "") -> None:
        super().__init__(op_name)
        self.arguments, self.function = Signature(signature), function or op_name.rpartition(".")[2]

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = self.arguments.bind(args, kwargs)
        given.pop("cudnn_enabled", None)
        if "reduction" in self.arguments.parameters:
            given["reduction"] = _REDUCTIONS[given.get("reduction", 0)]
        return getattr(F, self.function)(**given)


class CopyOfView(FunctionOp):
    """``view_copy``, ``permute_copy`` and so on: the view of that name, copied."""

    summary = OpSummary(
        "as the view of that name",
        pending="as the view",
        communicates="that of the view",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        view = getattr(torch.Tensor, func.__name__.removesuffix("_copy"))(*args, **kwargs)
        if isinstance(view, (tuple, list)):
            return tuple(part.clone(memory_format=torch.contiguous_format) for part in view)
        return view.clone(memory_format=torch.contiguous_format)
