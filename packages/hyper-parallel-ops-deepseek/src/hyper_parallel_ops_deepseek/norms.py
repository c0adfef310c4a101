"""``npu_rms_norm`` and ``npu_add_rms_norm``: the rule of ``rms_norm``, with its statistics as a second result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel import Placement
from hyper_parallel.rules import Call, OpSummary, OverAxes, R, S
from hyper_parallel_ops_basic.normalization.layer_norm import Normalise, RowNorm

__all__ = ["NpuAddRMSNorm", "NpuRMSNorm"]


class NpuRMSNorm(RowNorm):
    """``npu_rms_norm(self, gamma, epsilon)`` -> (y, rstd).

    Gamma's dims may be sharded with it (one all-reduce forward, one backward), the others freely.
    """

    summary = OpSummary(
        "every dim; those of gamma with it",
        communicates="sharded normalised dim: 1 all-reduce of one number per row | 1",
    )

    signature = "self, gamma, epsilon=1e-6"
    tensors: Sequence[str] = ("self",)
    affine: Sequence[str] = ("gamma",)

    def rank(self, call: Call) -> int:
        return len(call.spec("gamma").shape)

    def num_outputs(self, call: Call) -> int:
        return 2

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        shapes = [tuple(call.spec(name).shape) for name in self.tensors]
        if any(shape != shapes[0] for shape in shapes):
            raise RuntimeError(f"{call.name}: tensors of one shape expected, got {shapes}")
        first = len(shapes[0]) - self.rank(call)
        return [shapes[0], (*shapes[0][:first], *[1] * self.rank(call))]

    def outputs(self, d: int, first: int) -> Placement | Sequence[Placement]:
        return [S(d), S(d) if d < first else R]

    def compute(self, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int) -> Any:
        return self.normalised(given["self"], given, over, dims, count)

    @staticmethod
    def normalised(
        x: torch.Tensor, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two results for the local ``x``."""
        wide = x if x.dtype is torch.float64 else x.float()
        out, rstd = Normalise.apply(wide, over, dims, count, given.get("epsilon", 1e-6), False)
        return (out * given["gamma"]).to(x.dtype), rstd


class NpuAddRMSNorm(NpuRMSNorm):
    """``npu_add_rms_norm(x1, x2, gamma, epsilon)`` -> (y, rstd, x1 + x2)."""

    signature = "x1, x2, gamma, epsilon=1e-6"
    tensors = ("x1", "x2")

    def num_outputs(self, call: Call) -> int:
        return 3

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        out, rstd = super().output_shapes(call)
        return [out, rstd, out]

    def outputs(self, d: int, first: int) -> Placement | Sequence[Placement]:
        return [S(d), S(d) if d < first else R, S(d)]

    def compute(self, given: dict[str, Any], over: OverAxes, dims: tuple[int, ...], count: int) -> Any:
        total = given["x1"] + given["x2"]
        return *self.normalised(total, given, over, dims, count), total
