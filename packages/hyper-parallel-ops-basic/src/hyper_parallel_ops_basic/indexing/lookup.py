"""Looking up elements along a sharded dim, with a gradient whose sum along that dim every rank knows.

The gradient of ``log_softmax`` is ``g - softmax * sum(g)``; along sharded classes that sum is an all-reduce. Where
``g`` comes from a lookup (the targets' scores, in ``nll_loss`` or by ``gather``) nothing has to travel: a lookup's
result is a pending sum, whose gradient every rank has whole, and the elements of ``g`` are those of it.

So :class:`Lookup` notes the sums of the gradient that it makes, and :func:`known_sums` gives them to who receives that
very tensor. A hook that changes the gradient, a second use of the scores, whose gradient is added, a view or a cast in
between leave another tensor, or another version of it: then nothing is known, and the sums are all-reduced. (A write
through ``.data`` counts as none, as everywhere in autograd.) All ranks find the same: they run the same graph, and no
note depends on what a rank holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel import Layout


class _Note(NamedTuple):
    """What is known of a gradient of this layout, as long as it has this version."""

    sums: torch.Tensor
    layout: Layout
    dim: int
    version: int


_notes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Lookup(torch.autograd.Function):
    """``x.gather(dim, place)`` where this rank holds what is looked up, else 0: this rank's term of a pending sum."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, place: torch.Tensor, mine: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        """
        Args:
            x: this rank's piece of a tensor of layout ``layout``.
            place: positions in the piece, as many dims as ``x``; any where another rank holds the element.
            mine: which of them mean anything. Of the ranks that share the dim exactly one holds each element; where
                none does, no gradient may come back.
        """
        ctx.save_for_backward(place, mine)
        ctx.args = (x.shape, dim, layout)
        if not x.shape[dim]:
            return x.new_zeros(place.shape)
        return x.gather(dim, place).masked_fill_(~mine, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        place, mine = ctx.saved_tensors
        shape, dim, layout = ctx.args
        # A row for a rank without any: all ranks take part in further derivatives.
        to_x = grad.new_zeros([max(n, 1) if d == dim else n for d, n in enumerate(shape)])
        to_x.scatter_add_(dim, place, grad.masked_fill(~mine, 0))
        to_x = to_x if shape[dim] else to_x.narrow(dim, 0, 0)
        every_row = all(n == shape[d] for d, n in enumerate(place.shape) if d != dim)
        if every_row and not to_x.is_inference():  # which has no version that would tell of writes
            _notes[to_x] = _Note(grad.sum(dim, keepdim=True), layout, dim, to_x._version)
        return to_x, None, None, None, None


def known_sums(grad: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor | None:
    """The sums along ``dim`` over all ranks, length 1 there, of a gradient of a tensor of layout ``layout``; None where
    only the ranks together know them."""
    note: _Note | None = _notes.get(grad)
    if note is None or (note.layout, note.dim, note.version) != (layout, dim, grad._version):
        return None
    return note.sums
