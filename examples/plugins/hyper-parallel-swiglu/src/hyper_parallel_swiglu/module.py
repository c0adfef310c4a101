"""A feed-forward layer that uses the fused operator."""

from __future__ import annotations

import torch
from torch import nn

from hyper_parallel_swiglu.operators import swiglu


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with one matrix for gate and up; reached as ``hyper_parallel.SwiGLU``.

    Tensor-parallel over an axis: ``gate_up.weight`` with ``PackedShard(0, (width, width))``, ``down.weight`` with
    ``Shard(1)``; one all-reduce forward.

    Args:
        hidden: features of input and output.
        width: features in between.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x[..., hidden]`` to the same shape."""
        return self.down(swiglu(self.gate_up(x)))  # type: ignore[no-any-return]
