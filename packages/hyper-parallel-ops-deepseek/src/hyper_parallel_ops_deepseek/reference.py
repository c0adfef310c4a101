"""The NPU operators in plain PyTorch: their definitions, for any device and with gradients.

They have the names, arguments and results of ``torch_npu``'s and the same rules, so that a model written for NPUs runs
and is tested on a CPU. Sources: the operator pages of Ascend's op-plugin and the schemas in torch_npu.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from hyper_parallel.rules import torch_compat
from hyper_parallel_ops_basic.moe.grouped_mm import plain_grouped_mm

__all__ = [
    "npu_add_rms_norm",
    "npu_apply_adam_w",
    "npu_fusion_attention",
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
    "rotary_mul",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def _overridable(function: Function) -> Function:
    """Tensor subclasses get the call as one function, as they do a torch function."""

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(
            leaf for leaf in torch_compat.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        )
        if has_torch_function(tensors):
            return handle_torch_function(public, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return public  # type: ignore[return-value]


# -- norms --------------------------------------------------------------------------------------------------------


@_overridable
def npu_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """``self / rms(self) * gamma`` over gamma's dims, and ``1 / rms`` in float32 (no gradient), those dims being 1."""
    dims = tuple(range(-gamma.ndim, 0))
    wide = self if self.dtype is torch.float64 else self.float()
    rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma).to(self.dtype), rstd.detach()


@_overridable
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`npu_rms_norm` of ``x1 + x2``, and that sum as a third result."""
    total = x1 + x2
    out, rstd = npu_rms_norm(total, gamma, epsilon)
    return out, rstd, total


# -- elementwise --------------------------------------------------------------------------------------------------


@_overridable
def npu_rotary_mul(input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    """Rotary embedding: ``input * r1 + rotated * r2``, with cosines ``r1`` and sines ``r2`` of the whole last dim.

    Args:
        rotary_mode: ``"half"`` pairs element i with i + D/2, ``"interleave"`` neighbours.

    Raises:
        ValueError: for another mode.
    """
    return with_rotated(input, rotated(input, rotary_mode), r1, r2)


rotary_mul = npu_rotary_mul


def rotated(x: torch.Tensor, rotary_mode: str) -> torch.Tensor:
    """In the place of each element its partner, the first of the two negated."""
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    if rotary_mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    raise ValueError(f"rotary_mode is 'half' or 'interleave', got {rotary_mode!r}")


def with_rotated(x: torch.Tensor, other: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor) -> torch.Tensor:
    """The embedding of ``x``, given :func:`rotated` of it."""
    return (x * r1 + other * r2).to(x.dtype)


@_overridable
def npu_swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(first half) * second half`` along ``dim``."""
    gate, up = self.chunk(2, dim)
    return F.silu(gate) * up


# -- mixtures of experts ------------------------------------------------------------------------------------------


@_overridable
def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor | Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
) -> list[torch.Tensor]:
    """Products ``x_i @ weight_i (+ bias_i)`` of groups.

    Args:
        group_type: -1 (or None): the lists pair up. 0: one ``x [rows, k]``, whose rows are split among the matrices of
            one weight ``[groups, k, n]``. 2: one ``x [m, rows]`` and one weight ``[rows, n]``, rows split: ``[groups,
            m, n]``.
        group_list: the groups' rows: where each ends (``group_list_type=0``), or how many it has (1).
        split_item: 0 or 1: a result per weight; 2 or 3: one result.

    Raises:
        NotImplementedError: for quantised forms and other combinations.
    """
    if group_type in (-1, None) and len(x) == len(weight) and group_list is None:
        outs = [a @ b for a, b in zip(x, weight, strict=True)]
        if bias is not None:
            outs = [out + b for out, b in zip(outs, bias, strict=True)]
        return outs if split_item in (0, 1, None) else [torch.cat(outs)]
    if group_type not in (0, 2) or len(x) != 1 or len(weight) != 1 or split_item not in (2, 3) or group_list is None:
        raise NotImplementedError(
            f"npu_grouped_matmul of {len(x)} and {len(weight)} tensors with group_type={group_type}, "
            f"split_item={split_item}: the reference has group_type -1 with lists, and 0 or 2 with one tensor each, a "
            "group_list and split_item 2 or 3"
        )
    ends = group_ends(group_list, group_list_type, x[0].device)
    out = plain_grouped_mm(x[0], weight[0], ends)
    if bias is not None:
        rows = torch.arange(len(out), device=out.device)
        group = torch.searchsorted(ends.to(torch.int64), rows, right=True).clamp(max=len(ends) - 1)
        out = out + bias[0][group]
    return [out]


def group_ends(group_list: Any, group_list_type: int | None, device: torch.device) -> torch.Tensor:
    """Where each group ends, int32."""
    given = torch.as_tensor(group_list, device=device)
    return (given.cumsum(0) if group_list_type == 1 else given).to(torch.int32)


@_overridable
def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[tokens, hidden]`` sorted by expert, a copy for each of their experts.

    Args:
        indices: expert of each token, ``[tokens]``, or its experts ``[tokens, top_k]``.
        num_out_tokens: how many rows to keep; None or 0 all of them, a negative number drops as many at the end.

    Returns:
        the rows, and for each (token, expert) in order the row where it went, int32.
    """
    if padded_mode:
        raise NotImplementedError("npu_moe_token_permute: padded_mode=True has no reference")
    rows, where = sorted_by_expert(indices, num_out_tokens)
    return tokens.index_select(0, rows), where


def sorted_by_expert(indices: torch.Tensor, num_out_tokens: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each row, and for each (token, expert) in order the row where it went, int32."""
    copies = 1 if indices.ndim == 1 else indices.shape[1]
    order = torch.argsort(indices.reshape(-1), stable=True)
    return order[: num_out_tokens or None] // copies, torch.argsort(order).to(torch.int32)


@_overridable
def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Undo :func:`npu_moe_token_permute`: each token's rows times their ``probs [tokens, top_k]``, summed."""
    if padded_mode:
        raise NotImplementedError("npu_moe_token_unpermute: padded_mode=True has no reference")
    rows = permuted_tokens.index_select(0, sorted_indices.to(torch.int64))
    return rows if probs is None else weighted_sum(rows, probs)


def weighted_sum(rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Rows ``[tokens * top_k, hidden]`` times ``probs [tokens, top_k]``, summed by token."""
    rows = rows.view(*probs.shape, rows.shape[-1])
    return (rows * probs.unsqueeze(-1)).sum(1).to(rows.dtype)


# -- attention ----------------------------------------------------------------------------------------------------

# How each layout's dims become [batch, heads, tokens, features].
_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")


@_overridable
def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Attention: ``softmax(mask(scale * (q k^T + pse))) v``.

    Args:
        head_num: number of query heads.
        input_layout: dims of query, key and value: B batch, S tokens, N heads, D features, H heads times features, T
            the tokens of all sequences, whose ends are ``actual_seq_qlen`` and ``actual_seq_kvlen``.
        atten_mask: True (or 1) where a key is left out, the opposite of PyTorch's boolean mask. Without one every key
            is seen, whatever ``sparse_mode`` and the band say; modes 2 to 4 want the kernel's pattern of 2048 by 2048,
            of which nothing is read here.
        sparse_mode: 0 (``atten_mask`` as it is, and the band of ``pre_tockens`` and ``next_tockens``), 1 (as it is), 2
            (causal from the upper left), 3 (causal to the lower right), 4 (that band, from the lower right).
        keep_prob: one minus the probability of dropout.

    Returns:
        the result in query's layout; maximum and sum of the softmax ``[B, N, S, 8]`` (``[T, N, 8]``) in float32, no
        gradient; an empty tensor; and three numbers for the kernel's own backward.

    Raises:
        NotImplementedError: for ``padding_mask`` and ``prefix``, and other layouts and modes.
    """
    if input_layout not in _LAYOUTS or sparse_mode not in range(5):
        raise NotImplementedError(
            f"npu_fusion_attention: input_layout={input_layout!r}, sparse_mode={sparse_mode} has no reference; layouts "
            f"are {', '.join(_LAYOUTS)}, modes 0 to 4"
        )
    if padding_mask is not None or prefix is not None:
        raise NotImplementedError("npu_fusion_attention: padding_mask and prefix have no reference")
    attention = functools.partial(
        _attention,
        pse=pse,
        mask=atten_mask,
        scale=scale,
        keep_prob=keep_prob,
        band=(pre_tockens, next_tockens),
        mode=sparse_mode,
        sink=sink,
    )
    if input_layout == "TND":
        if actual_seq_qlen is None or actual_seq_kvlen is None:
            raise ValueError("npu_fusion_attention: layout TND needs actual_seq_qlen and actual_seq_kvlen")
        parts = []
        for rows, columns in zip(_ranges(actual_seq_qlen), _ranges(actual_seq_kvlen), strict=True):
            pieces = query[slice(*rows)], key[slice(*columns)], value[slice(*columns)]
            parts.append(attention(*(x.transpose(0, 1).unsqueeze(0) for x in pieces)))
        out, largest, total = (torch.cat([p[i].squeeze(0).transpose(0, 1) for p in parts]) for i in range(3))
    else:
        q, k, v = (_heads_first(x, input_layout, head_num, query) for x in (query, key, value))
        out, largest, total = attention(q, k, v)
        out = _as_layout(out, input_layout)
    return out, largest, total, query.new_empty(0), 0, 0, 0


def _ranges(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *(int(n) for n in ends)]))


def _heads_first(x: torch.Tensor, layout: str, head_num: int, query: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, tokens, features]``."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    features = query.shape[-1] // head_num
    split = x.unflatten(-1, (-1, features))
    return split.permute(0, 2, 1, 3) if layout == "BSH" else split.permute(1, 2, 0, 3)


def _as_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    return (x.permute(0, 2, 1, 3) if layout == "BSH" else x.permute(2, 0, 1, 3)).flatten(-2)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pse: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    keep_prob: float,
    band: tuple[int, int],
    mode: int,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1)
    scores = (scores if scores.dtype is torch.float64 else scores.float()) * scale
    if pse is not None:
        scores = scores + pse * scale
    if mask is not None:
        unseen = left_out(q.shape[-2], k.shape[-2], mask, band, mode, q.device)
        scores = scores.masked_fill(unseen, torch.finfo(scores.dtype).min)
    # A sequence may be empty.
    largest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    if sink is not None:  # a logit per head that takes its part of the softmax and gives no value
        largest = torch.maximum(largest, sink.view(-1, 1, 1))
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.view(-1, 1, 1) - largest).exp()
    weights = weights / total
    if keep_prob < 1:
        weights = F.dropout(weights, 1 - keep_prob)
    statistics = (x.detach().float().expand(*x.shape[:-1], 8).clone() for x in (largest, total))
    return (weights.to(v.dtype) @ v, *statistics)  # type: ignore[return-value]


def left_out(
    rows: int, columns: int, mask: torch.Tensor, band: tuple[int, int], mode: int, device: torch.device
) -> torch.Tensor:
    """Which keys each query does not see."""
    i = torch.arange(rows, device=device).unsqueeze(1)
    j = torch.arange(columns, device=device)
    if mode in (3, 4):
        i = i + columns - rows  # the last query sees the last key
    if mode in (2, 3):
        return j > i
    before, after = band
    outside = (j < i - before) | (j > i + after)
    return outside if mode == 4 else mask.bool() if mode == 1 else mask.bool() | outside


# -- optimizer ----------------------------------------------------------------------------------------------------


@_overridable
def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    max_grad_norm: torch.Tensor | None = None,
    amsgrad: bool | None = False,
    maximize: bool | None = False,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of AdamW on ``out = (parameter, first moment, second moment)``, in place.

    Args:
        beta1_power, beta2_power: the betas to the power of the steps made before this one.
        max_grad_norm: largest second moment so far, for ``amsgrad``; updated in place.
    """
    parameter, first, second = out
    with torch.no_grad():
        step = -grad if maximize else grad
        first.mul_(beta1).add_(step, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(step, step, value=1 - beta2)
        largest = second
        if amsgrad:
            if max_grad_norm is None:
                raise ValueError("npu_apply_adam_w: amsgrad=True needs max_grad_norm")
            largest = torch.maximum(max_grad_norm, second, out=max_grad_norm)
        scale = (largest / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
        parameter.mul_(1 - lr * weight_decay)
        parameter.addcdiv_(first, scale, value=-lr / (1 - beta1_power * beta1))
    return out
