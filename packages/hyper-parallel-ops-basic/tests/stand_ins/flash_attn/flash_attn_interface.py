"""The functions of flash_attn 2, each by the ``apply`` of an autograd function with the same name and parameters."""

import functools

import torch
from plain_flash_attention import attention, gradients, packed_attention


class _Kernel(torch.autograd.Function):
    """Forward and backward of a function of some tensors, of which the backward knows nothing but its results."""

    @staticmethod
    def run(ctx, function, tensors, dropout, return_softmax):
        out, sums = function(*tensors, dropout=dropout)
        ctx.function = functools.partial(function, dropout=dropout)
        ctx.save_for_backward(*tensors)
        pattern = out.new_empty(0) if not dropout else out.new_zeros(*sums.shape, 128)
        return (out, sums, pattern) if return_softmax else out

    @staticmethod
    def backward(ctx, grad, *_):
        # One for each parameter of forward; PyTorch takes more where they are None.
        return *gradients(ctx.function, ctx.saved_tensors, grad), *[None] * 14


def _options(softmax_scale, causal, window_size, softcap, alibi_slopes):
    return {
        "scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap, "slopes": alibi_slopes,
    }  # fmt: skip


class FlashAttnFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_softmax, is_grad_enabled,
    ):  # fmt: skip
        options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
        return _Kernel.run(ctx, functools.partial(attention, **options), (q, k, v), dropout_p, return_softmax)


class FlashAttnKVPackedFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_softmax, is_grad_enabled,
    ):  # fmt: skip
        options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)

        def run(q, kv, **dropout):
            return attention(q, *kv.unbind(2), **options, **dropout)

        return _Kernel.run(ctx, run, (q, kv), dropout_p, return_softmax)


class FlashAttnQKVPackedFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_softmax,
        is_grad_enabled,
    ):  # fmt: skip
        options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)

        def run(qkv, **dropout):
            return attention(*qkv.unbind(2), **options, **dropout)

        return _Kernel.run(ctx, run, (qkv,), dropout_p, return_softmax)


class FlashAttnVarlenFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_softmax, block_table, is_grad_enabled,
    ):  # fmt: skip
        options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)

        def run(q, k, v, **dropout):
            return packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options, **dropout)

        return _Kernel.run(ctx, run, (q, k, v), dropout_p, return_softmax)


class FlashAttnVarlenKVPackedFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_softmax, is_grad_enabled,
    ):  # fmt: skip
        options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)

        def run(q, kv, **dropout):
            return packed_attention(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, **options, **dropout)

        return _Kernel.run(ctx, run, (q, kv), dropout_p, return_softmax)


class FlashAttnVarlenQKVPackedFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_softmax, is_grad_enabled,
    ):  # fmt: skip
        options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)

        def run(qkv, **dropout):
            return packed_attention(*qkv.unbind(1), cu_seqlens, cu_seqlens, **options, **dropout)

        return _Kernel.run(ctx, run, (qkv,), dropout_p, return_softmax)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return FlashAttnFunc.apply(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return FlashAttnKVPackedFunc.apply(
        q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return FlashAttnQKVPackedFunc.apply(
        qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    return FlashAttnVarlenFunc.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return FlashAttnVarlenKVPackedFunc.apply(
        q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return FlashAttnVarlenQKVPackedFunc.apply(
        qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip
