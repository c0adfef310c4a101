"""Stands in for flash_attn 3: other parameters in another order, and one result beside the output."""

import functools

import torch
from plain_flash_attention import attention, gradients, packed_attention


class _Kernel(torch.autograd.Function):
    """Forward and backward of a function of some tensors, of which the backward knows nothing but its results."""

    @staticmethod
    def run(ctx, function, tensors, return_softmax):
        ctx.function = function
        ctx.save_for_backward(*tensors)
        out, sums = function(*tensors)
        return (out, sums) if return_softmax else out

    @staticmethod
    def backward(ctx, grad, *_):
        # One for each parameter of forward; PyTorch takes more where they are None.
        return *gradients(ctx.function, ctx.saved_tensors, grad), *[None] * 20


class FlashAttnFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, q, k, v, softmax_scale, causal, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_softmax=False,
    ):  # fmt: skip
        run = functools.partial(attention, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)
        return _Kernel.run(ctx, run, (q, k, v), return_softmax)


class FlashAttnQKVPackedFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, qkv, softmax_scale, causal, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_softmax=False,
    ):  # fmt: skip
        def run(qkv):
            if num_heads_q is None:
                parts = qkv.unbind(2)
            else:
                of_keys = (qkv.shape[2] - num_heads_q) // 2
                parts = qkv.split([num_heads_q, of_keys, of_keys], 2)
            return attention(*parts, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)

        return _Kernel.run(ctx, run, (qkv,), return_softmax)


class FlashAttnVarlenFunc(_Kernel):
    @staticmethod
    def forward(
        ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,
        causal, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_softmax=False,
    ):  # fmt: skip
        run = functools.partial(
            packed_attention, starts_q=cu_seqlens_q, starts_k=cu_seqlens_k, scale=softmax_scale, causal=causal,
            window=window_size, softcap=softcap,
        )  # fmt: skip
        return _Kernel.run(ctx, run, (q, k, v), return_softmax)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False):
    return FlashAttnFunc.apply(
        q, k, v, softmax_scale, causal, None, None, None, None, window_size, 0, 0.0, 1, None, False, 0,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, window_size=(-1, -1), num_heads_q=None, return_attn_probs=False
):
    return FlashAttnQKVPackedFunc.apply(
        qkv, softmax_scale, causal, None, None, None, window_size, 0, 0.0, False, num_heads_q, 0, return_attn_probs
    )


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    window_size=(-1, -1), return_attn_probs=False,
):  # fmt: skip
    return FlashAttnVarlenFunc.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k, softmax_scale, causal, None, None,
        None, None, window_size, 0, 0.0, 1, None, False, 0, return_attn_probs,
    )  # fmt: skip
