"""What a mask or the values pick: ``nonzero``, ``where(condition)``, ``masked_select``.

The number of results is known only when they are computed, equally on all ranks. They come out in the order of one
device, spread evenly over the mesh axes that shard the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy
from hyper_parallel.rules import (
    Call,
    Elementwise,
    FunctionOp,
    LayoutOp,
    OpSummary,
    Signature,
    Solution,
    broadcast_shape,
    dispatch,
    global_indices,
)
from hyper_parallel_ops_basic.indexing.mask_positions import Picked, by_data, known
from hyper_parallel_ops_basic.values.factories import settled

_ARGUMENTS = Signature("input, mask")  # of masked_select


class NonZero(LayoutOp):
    """``nonzero`` and ``argwhere``: the global indices of the elements that are not 0."""

    summary = OpSummary(
        "every dim; the result is spread over the same axes",
        communicates="1 or 2 all-gathers of counts and indices, 1 all-to-all of the results",
    )

    signature = "input, *, as_tuple=False"

    def solve(self, call: Call) -> Solution:
        target = settled(call.inputs[0].layout)
        as_tuple = bool(call.arg("as_tuple", False))
        return Solution([target], [], nonzero_of(target, tuple(call.inputs[0].shape), as_tuple), meta=by_data)


class Where(Elementwise):
    """``where(condition, a, b)``; with a condition alone it is ``nonzero`` as a tuple."""

    signature = "condition, input, other"

    def __init__(self, op_name: str) -> None:
        super().__init__(op_name)
        self.summary = OpSummary(
            "every dim, operands alike; broadcast dims stay whole",
            communicates="none; with a condition alone as `nonzero`",
        )

    @staticmethod
    def _finds(call: Call) -> bool:
        return len(call.args) + len(call.kwargs) == 1

    def num_outputs(self, call: Call) -> int:
        return max(len(call.inputs[0].shape), 1) if self._finds(call) else 1

    def strategies(self, call: Call) -> Iterable[Strategy]:
        return () if self._finds(call) else super().strategies(call)

    def solve(self, call: Call) -> Solution:
        if not self._finds(call):
            return super().solve(call)
        target = settled(call.inputs[0].layout)
        return Solution([target], [], nonzero_of(target, tuple(call.inputs[0].shape), True), meta=by_data)


def nonzero_of(layout: Layout, shape: tuple[int, ...], as_tuple: bool) -> Callable[..., Any]:
    """Function of this rank's piece that gives the indices as DTensors."""

    def find(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = x.detach() != 0
        if not shape:  # a number: one row of no columns (as a tuple, one column), or none
            chosen = chosen.reshape(1) if as_tuple else chosen
            rows, whole = chosen.nonzero(), layout.replicated(1 if as_tuple else 2)
            return (known(rows.squeeze(1), whole, (len(rows),)),) if as_tuple else known(rows, whole, rows.shape)
        mine = chosen.nonzero()
        picked = Picked(chosen, layout, shape)
        # As on one device, the indices along one dim lie side by side in memory.
        by_dim = torch.stack([global_indices(layout, shape, d, x.device)[mine[:, d]] for d in range(len(shape))])
        by_dim = picked.spread(by_dim, 1)
        if not as_tuple:
            spread = picked.layout_of(layout.replicated(2), 2, 0)
            return known(by_dim.t(), spread, (picked.total, len(shape)), (1, picked.total))
        spread = picked.layout_of(layout.replicated(1), 1, 0)
        return tuple(known(column, spread, (picked.total,)) for column in by_dim.unbind())

    return find


class MaskedSelect(FunctionOp):
    """``masked_select(input, mask)``: what ``input[mask]`` gives after broadcasting."""

    summary = OpSummary(
        "every dim; as `input[mask]`",
        pending="passes, of any kind",
        communicates="as `input[mask]`",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        named = _ARGUMENTS.bind(args, kwargs)
        tensor, mask = named["input"], named["mask"]
        shape = broadcast_shape([tensor.shape, mask.shape])
        return dispatch(torch.Tensor.__getitem__, (tensor.expand(shape), mask.expand(shape)), {})
