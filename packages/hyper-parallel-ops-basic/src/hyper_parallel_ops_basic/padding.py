"""``F.pad`` in every mode, along sharded dims too: what crosses the ranks' borders travels, nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.call import Call
from hyper_parallel.families.moving import NOTHING, Moving
from hyper_parallel.op import OpSummary


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

    def maps(self, call: Call) -> dict[int, torch.Tensor]:
        shape, pad, mode = call.spec("input").shape, call.arg("pad"), call.arg("mode", "constant")
        widths: dict[int, tuple[int, int]] = {}
        for i in range(0, len(pad), 2):
            if pad[i] or pad[i + 1]:
                widths[len(shape) - 1 - i // 2] = (pad[i], pad[i + 1])
        return {d: _source(shape[d], *width, mode) for d, width in widths.items()}


def _source(size: int, before: int, after: int, mode: str) -> torch.Tensor:
    """The element that each position of a padded dim shows."""
    index = torch.arange(size)
    if mode == "constant":
        return F.pad(index, (before, after), value=NOTHING)
    # Positions have the numbers of pixels: padded as an image of one row, they tell where each comes from.
    return F.pad(index.double().view(1, 1, size), (before, after), mode=mode).view(-1).long()
