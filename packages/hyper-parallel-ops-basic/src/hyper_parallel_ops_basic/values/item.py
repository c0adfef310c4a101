"""Reading values out of a DTensor: ``item``, ``tolist``, ``numpy``, ``bool(x)``, ``equal``, ``allclose``.

What is read is always the global value, the same on every rank, for any layout and policy. A sharded or pending tensor
is gathered for it, so **all ranks of its mesh must make the call**.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import DTensor
from hyper_parallel.rules import FunctionOp, OpSummary, local_of


class Read(FunctionOp):
    """A function that returns no tensor, run on the whole tensors. Collective over the mesh.

    Args:
        gives_memory: what is returned may be the memory of this rank's piece (``numpy``); a tensor that requires a
            gradient is refused, as in PyTorch.
    """

    summary = OpSummary(
        "every dim",
        pending="reduced first",
        communicates="1 all-gather: the value is wanted on every rank",
    )

    def __init__(self, op_name: str, *, gives_memory: bool = False) -> None:
        super().__init__(op_name)
        self.gives_memory = gives_memory

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.gives_memory and args[0].requires_grad and not kwargs.get("force"):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with torch.no_grad():
            return func(*(self._whole(a) for a in args), **{n: self._whole(value) for n, value in kwargs.items()})

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        # The reduced form is remembered: a norm or loss that was used is read again for nothing.
        reduced = value.reduce_partial().detach()
        if self.gives_memory:
            return reduced.full_tensor()
        return local_of(reduced.redistribute(reduced.layout.replicated()))
