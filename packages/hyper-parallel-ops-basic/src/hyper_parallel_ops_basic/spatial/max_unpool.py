"""``max_unpool``: elements go to the places that their indices say, on other ranks too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    AxisGroup,
    Call,
    OpSummary,
    S,
    Solution,
    fit_rank,
    local_shape,
    plain,
    primitives,
    zeros_from,
)
from hyper_parallel_ops_basic.indexing.flattened_dims import held_places


class MaxUnpool(StrategyOp):
    """``max_unpool`` of ``[batch, channels, *positions]`` (or without the batch), with indices into whole planes.

    Where an index repeats in a plane with another value, one of the values is written, as in PyTorch, which promises no
    more; every one gets the gradient of the place.

    Args:
        dims: number of position dims.
    """

    summary = OpSummary(
        "every dim",
        communicates="sharded positions: 1 all-gather of counts; where some elements have their place on another rank "
        "2 all-to-alls, of these and of their places | 1 all-to-all",
    )

    signature = "input, indices, kernel_size, stride=None, padding=0, output_size=None"

    def __init__(self, op_name: str, *, dims: int) -> None:
        super().__init__(op_name)
        self.dims = dims

    def strategies(self, call: Call) -> Iterable[Strategy]:
        for d in range(len(call.inputs[0].shape)):
            yield Strategy([S(d)] * len(call.inputs), S(d))

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        solution.outputs = [self._output(layout, call) for layout in solution.outputs]
        return solution

    def _output(self, layout: Layout | None, call: Call) -> Layout:
        """Layout of the result: positions lie plainly."""
        assert layout is not None
        ndim = len(call.inputs[0].shape)
        return plain(fit_rank(layout, ndim), range(ndim - self.dims, ndim))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        func, (result,), arguments = call.func, call.output_shapes(), self.arguments
        first = len(result) - self.dims
        if any(targets[0].shard_order[first:]):
            placed = Placing(self._output(outputs[0], call), result, first)

            def on_places(*args: Any, **kwargs: Any) -> torch.Tensor:
                given = arguments.bind(args, kwargs)
                return placed(given["input"], given["indices"])

            return on_places

        def on_planes(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return func(x, *args, **kwargs) if x.numel() else zeros_from((*x.shape[:first], *result[first:]), x)

        return on_planes


class Placing:
    """Elements of planes, put where their indices say.

    Args:
        output, shape: layout and global shape of the result.
        first: of the dims of a plane, which are the last ones and of which some are sharded.
    """

    def __init__(self, output: Layout, shape: tuple[int, ...], first: int) -> None:
        self.group = output.info.group(tuple(sorted(a for axes in output.shard_order[first:] for a in axes)))
        self.piece, self.first = local_shape(output, shape, output.info.my_coordinate()), first
        held = [held_places(output, shape, first, c) for c in self.group.coordinates]
        self.sizes = torch.tensor([len(places) for places in held])
        self.places = math.prod(shape[first:])
        self.owner = torch.zeros(max(self.places, 1), dtype=torch.int64)
        self.spot = torch.zeros_like(self.owner)  # in the owner's part of the plane
        for member, places in enumerate(held):
            self.owner[places], self.spot[places] = member, torch.arange(len(places))

    def __call__(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the result, from its elements and their indices.

        Raises:
            RuntimeError: on every rank of the group, when an index of one of them is in no plane.
        """
        planes = math.prod(self.piece[: self.first])
        places = indices.reshape(planes, math.prod(indices.shape[self.first :]))
        unknown = (places < 0) | (places >= self.places)
        places = places.masked_fill(unknown, 0)
        owner, spot, sizes = (t.to(x.device) for t in (self.owner, self.spot, self.sizes))
        owner, spot = owner[places], spot[places]
        spot = spot + torch.arange(planes, device=x.device).unsqueeze(1) * sizes[owner]
        owner, spot, values = owner.flatten(), spot.flatten(), x.reshape(-1)
        leaves = owner != self.group.rank
        leaving = leaves.nonzero().squeeze(1)
        leaving = leaving[owner[leaving].argsort(stable=True)]
        sends, receives, some_leave = self._counts(owner[leaving], unknown)
        size = math.prod(self.piece)
        spots, elements = [spot.masked_fill(leaves, size)], [values]  # those that leave go to a place more, cut off
        if some_leave:
            for parts, sent in ((spots, spot), (elements, values)):
                parts.append(_Sent.apply(sent[leaving], sends, receives, self.group))
        room = values.new_zeros(size + 1)
        # As rows: of parts of one dim cat's gradient leaves out empty ones, and all ranks have to go on from there.
        together = torch.cat([part.unsqueeze(0) for part in elements], 1).squeeze(0)
        return room.scatter(0, torch.cat(spots), together)[:-1].view(self.piece)

    def _counts(self, owners: torch.Tensor, unknown: torch.Tensor) -> tuple[list[int], list[int], bool]:
        """How many elements this rank sends to each member of the group and receives from it, and whether any rank
        sends some; one all-gather."""
        members, me = self.group.size, self.group.rank
        row = torch.cat([torch.bincount(owners, minlength=members), unknown.sum().view(1)])
        known = row.new_empty(members * (members + 1))
        primitives.all_gather(known, row, self.group)
        rows = known.view(members, members + 1).tolist()
        if wrong := sum(row[-1] for row in rows):
            raise RuntimeError(f"Found an invalid max index: {wrong} of them are in no plane of {self.places} places")
        return rows[me][:-1], [row[me] for row in rows], any(any(row) for row in rows)


class _Sent(torch.autograd.Function):
    """Elements sent to other ranks, so many to each and so many from each; their gradients are sent back."""

    @staticmethod
    def forward(
        ctx: Any, elements: torch.Tensor, sends: list[int], receives: list[int], group: AxisGroup
    ) -> torch.Tensor:
        ctx.args = (receives, sends, group)
        out = elements.new_empty(sum(receives))
        primitives.all_to_all(out, elements.contiguous(), receives, sends, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _Sent.apply(grad, *ctx.args), None, None, None
