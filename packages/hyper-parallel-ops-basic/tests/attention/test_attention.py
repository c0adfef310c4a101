"""scaled_dot_product_attention against plain torch, on all layouts."""

import torch
import torch.nn.functional as F

from hyper_parallel.testing import OpConformance, sample, tensor


def qkv(batch, heads, kv_heads, queries, keys, features=2, values=2):
    return (
        tensor(batch, heads, queries, features),
        tensor(batch, kv_heads, keys, features),
        tensor(batch, kv_heads, keys, values),
    )


KEPT = torch.tensor(
    [[[[True, False, True, True, False], [True, True, True, False, False], [False, True, True, True, True]]]]
)


class TestAttention(OpConformance):
    op = F.scaled_dot_product_attention
    meshes = ((4,), (2, 2))
    max_layouts = 20
    samples = (
        sample(*qkv(3, 5, 5, 3, 4)),
        sample(*qkv(1, 2, 2, 5, 5), is_causal=True),
        sample(*qkv(2, 4, 4, 3, 5), KEPT).options(name="mask"),
        sample(*qkv(2, 4, 1, 3, 5), tensor(4, 3, 5), scale=0.3).options(name="bias"),
        sample(*qkv(2, 8, 4, 3, 2), enable_gqa=True).options(name="gqa"),
        sample(*qkv(1, 6, 2, 3, 3, 2, 3), is_causal=True, enable_gqa=True).options(name="gqa-uneven"),
        sample(tensor(3, 4, 2), tensor(3, 5, 2), tensor(3, 5, 2)).options(name="one-head"),
    )


def with_dropout(query, key, value, mask=None):
    torch.manual_seed(3)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.4)


class TestDropout(OpConformance):
    """Every element meets the fate that it has on one device."""

    op = with_dropout
    meshes = ((4,), (2, 2))
    max_layouts = 20
    samples = (sample(*qkv(2, 5, 5, 3, 4)), sample(*qkv(2, 4, 4, 3, 5), KEPT).options(name="mask"))


def self_attention(x, in_weight, in_bias, out_weight, out_bias):
    out, weights = F.multi_head_attention_forward(
        x, x, x, 4, 2, in_weight, in_bias, None, None, False, 0.0, out_weight, out_bias, training=True
    )
    return out, weights


class TestMultiHeadAttention(OpConformance):
    """``nn.MultiheadAttention``: PyTorch's own Python body on DTensors."""

    op = self_attention
    meshes = ((4,), (2, 2))
    max_layouts = 8
    samples = (sample(tensor(3, 5, 4), tensor(12, 4), tensor(12), tensor(4, 4), tensor(4)),)
