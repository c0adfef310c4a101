"""``masked_scatter``: what a mask picks gets the elements of a source, in order."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.boxes import local_shape
from hyper_parallel.call import Call, Solution
from hyper_parallel.families.elementwise import broadcast_shape
from hyper_parallel.op import OpSummary
from hyper_parallel.strategy import LayoutOp

from .factories import settled
from .picking import Picked, of_dims


class MaskedScatter(LayoutOp):
    """``masked_scatter(input, mask, source)``: the picked elements get those of ``source``, in order.

    The mask is laid out like the input, which broadcasts with it as far as it is not written to; the source is whole on
    each rank, which takes what its picked elements need.
    """

    summary = OpSummary(
        "every dim of input and mask",
        communicates="1 or 2 all-gathers of counts and indices",
        whole="the source: which element goes where depends on the data",
    )

    signature = "input, mask, source"

    def solve(self, call: Call) -> Solution:
        spec, mask = call.inputs[0], call.spec("mask")
        shape = tuple(spec.shape) if call.inplace else broadcast_shape([spec.shape, mask.shape])
        grown = len(shape) - len(spec.shape)
        full = [d for d, size in enumerate(spec.shape) if size == shape[d + grown]]
        like = of_dims(settled(spec.layout), full)
        target = like.move_dims([d + grown for d in full], len(shape))
        added = len(shape) - len(mask.shape)
        kept = [d for d in range(len(shape)) if d >= added and mask.shape[d - added] == shape[d]]
        mask_layout = of_dims(target, kept).move_dims([d - added for d in kept], len(mask.shape))
        targets = [like.move_dims(full, len(spec.shape)), mask_layout, call.spec("source").layout.replicated()]
        sizes = local_shape(target, shape, target.info.my_coordinate())
        arguments, in_place = self.arguments, call.inplace

        def scatter(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = arguments.bind(args, kwargs)
            x, source = given["input"], given["source"].reshape(-1)
            x = x if in_place else x.expand(sizes)
            chosen = given["mask"].expand(sizes)
            picked = Picked(chosen, target, shape)
            if picked.total > source.numel():
                raise RuntimeError(
                    f"masked_scatter: expected at least {picked.total} elements in source, got {source.numel()}"
                )
            put = torch.Tensor.masked_scatter_ if in_place else torch.masked_scatter
            return put(x, chosen, source[picked.places.to(x.device)])

        return Solution(targets, [target], scatter, shapes=[shape])
