"""Reading values out of a DTensor: ``item``, ``tolist``, ``numpy``, ``bool(x)``, ``equal``, ``allclose``.

What is read is always the global value, the same on every rank, for any layout and policy. A sharded or pending tensor
is gathered for it, so **all ranks of its mesh must make the call**.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import DTensor
from hyper_parallel.rules import FunctionOp, OpSummary


class Read(FunctionOp):
    """A function that returns no tensor, run on the whole tensors. Collective over the mesh.

    Args:
        keeps_grad_check: hand a tensor that requires a gradient on as such, for PyTorch's own error (``numpy``).
    """

    summary = OpSummary(
        "every dim",
        pending="reduced first",
        communicates="1 all-gather: the value is wanted on every rank",
    )

    def __init__(self, op_name: str, *, keeps_grad_check: bool = False) -> None:
        super().__init__(op_name)
        self.keeps_grad_check = keeps_grad_check

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.keeps_grad_check and args[0].requires_grad and not kwargs.get("force"):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with torch.no_grad():
            return func(*(_whole(a) for a in args), **{name: _whole(value) for name, value in kwargs.items()})


def _whole(value: Any) -> Any:
    # The reduced form is remembered: a norm or loss that was used is read again for nothing.
    return value.reduce_partial().detach().full_tensor() if isinstance(value, DTensor) else value
