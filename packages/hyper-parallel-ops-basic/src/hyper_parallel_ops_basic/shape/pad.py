"""``F.pad`` in every mode, along sharded dims too: what crosses the ranks' borders travels, nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.rules import NOTHING, Call, Moving, OpSummary, Solution, zeros_from


class Pad(Moving):
    """``F.pad(input, pad, mode, value)``; padding with zeros is linear. Negative widths cut off."""

    summary = OpSummary(
        "every dim",
        pending="passes where the value is 0",
        communicates="sharded padded dim: 1 all-to-all of the elements that change rank | the same",
    )

    signature = "input, pad, mode=constant, value=None"
    floats_matter = True  # a pending sum passes when the value is zero

    def fill(self, call: Call) -> Any:
        return (call.arg("value") or 0) if call.arg("mode", "constant") == "constant" else 0

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        if solution.local is not None or call.arg("mode", "constant") == "constant":
            return solution
        func, widths = call.func, self._widths(call)

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if x.numel():
                return func(x, *args, **kwargs)
            # The kernels want channels and samples.
            return zeros_from([n + sum(widths.get(d, ())) for d, n in enumerate(x.shape)], x)

        solution.local = local
        return solution

    def maps(self, call: Call) -> dict[int, torch.Tensor]:
        shape, mode = call.spec("input").shape, call.arg("mode", "constant")
        return {d: _source(shape[d], *width, mode) for d, width in self._widths(call).items()}

    @staticmethod
    def _widths(call: Call) -> dict[int, tuple[int, int]]:
        """Of each padded dim, how much is added before and after."""
        pad, ndim = call.arg("pad"), len(call.spec("input").shape)
        pairs = ((ndim - 1 - i // 2, (pad[i], pad[i + 1])) for i in range(0, len(pad), 2))
        return {d: width for d, width in pairs if any(width)}


def _source(size: int, before: int, after: int, mode: str) -> torch.Tensor:
    """The element that each position of a padded dim shows."""
    index = torch.arange(size)
    if mode == "constant":
        return F.pad(index, (before, after), value=NOTHING)
    # Positions have the numbers of pixels: padded as an image of one row, they tell where each comes from.
    return F.pad(index.double().view(1, 1, size), (before, after), mode=mode).view(-1).long()
