"""Steps of recurrent networks, and bags of embeddings, in terms of other functions; see
:mod:`hyper_parallel_ops_basic.decompositions.composed`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyper_parallel_ops_basic.decompositions.composed import plain_like

Tensor = torch.Tensor
Bias = Tensor | None


def rnn_tanh_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Bias = None, b_hh: Bias = None
) -> Tensor:
    return (F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh)).tanh()


def rnn_relu_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Bias = None, b_hh: Bias = None
) -> Tensor:
    return (F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh)).relu()


def lstm_cell(
    input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Bias = None, b_hh: Bias = None
) -> tuple[Tensor, Tensor]:
    gates = F.linear(input, w_ih, b_ih) + F.linear(hx[0], w_hh, b_hh)
    into, forget, cell, out = gates.chunk(4, 1)
    state = forget.sigmoid() * hx[1] + into.sigmoid() * cell.tanh()
    return out.sigmoid() * state.tanh(), state


def gru_cell(input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Bias = None, b_hh: Bias = None) -> Tensor:
    given, kept = F.linear(input, w_ih, b_ih).chunk(3, 1), F.linear(hx, w_hh, b_hh).chunk(3, 1)
    reset, update = (given[0] + kept[0]).sigmoid(), (given[1] + kept[1]).sigmoid()
    new = (given[2] + reset * kept[2]).tanh()
    return (hx - new) * update + new


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    if max_norm is not None or sparse or scale_grad_by_freq:
        raise NotImplementedError(
            "embedding_bag of a DTensor has no rule for max_norm, sparse and scale_grad_by_freq, which depend on the "
            "ids of all ranks: leave them out, or use F.embedding and a sum"
        )
    rows = F.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    known = None if padding_idx is None else input != padding_idx % weight.shape[0]
    if input.ndim == 1:
        if offsets is None:
            raise ValueError("offsets has to be a 1D Tensor but got None")
        bags = len(offsets) - include_last_offset
        places = torch.arange(len(input), device=input.device)
        bag = torch.bucketize(plain_like(input, places), offsets[:bags], right=True) - 1
        return _folded(rows, known, mode, bag, bags)
    return _folded(rows, known, mode)


def _folded(rows: Tensor, known: Tensor | None, mode: str, bag: Tensor | None = None, bags: int = 0) -> Tensor:
    """Rows of each bag as one: those of a dim, or those with the bag's number. Of none: zeros."""
    if mode == "max":
        lowest = rows if known is None else rows.masked_fill(~known.unsqueeze(-1), -math.inf)
        if bag is None:
            out = lowest.max(1).values
        else:
            start = rows.new_full((bags, rows.shape[1]), -math.inf)
            out = start.index_reduce(0, bag, lowest, "amax")
        return out.masked_fill(out == -math.inf, 0)
    rows = rows if known is None else rows * known.unsqueeze(-1)
    if bag is None:
        out, count = rows.sum(1), rows.shape[1] if known is None else known.sum(1).clamp_min(1).unsqueeze(-1)
    else:
        out = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
        ones = (torch.ones_like(bag) if known is None else known).to(rows.dtype)
        count = rows.new_zeros(bags).index_add(0, bag, ones).clamp_min(1).unsqueeze(-1)
    return out / count if mode == "mean" else out
