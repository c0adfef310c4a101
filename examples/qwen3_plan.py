"""Where each parameter of a Qwen3 model lives on a (dp, tp) mesh.

The projections into heads and into the MLP are split by output feature, those back out by input feature, so that a
block needs one all-reduce for its attention and one for its MLP. Embedding and output layer are split by vocabulary:
the logits are never gathered, the loss works on the pieces. Everything is repeated over dp, which splits the batch.
"""

from __future__ import annotations

from hyper_parallel import Replicate, Shard, ShardingPlan

_REPLICATED = (Replicate(), Replicate())
_BY_OUTPUT = (Replicate(), Shard(0))  # a linear layer's weight is (out_features, in_features)
_BY_INPUT = (Replicate(), Shard(1))
_BY_WORD = (Replicate(), Shard(0))  # an embedding's weight is (vocabulary, hidden)

QWEN3_PLAN = ShardingPlan(
    plan={
        "model.embed_tokens.weight": _BY_WORD,
        "model.layers.*.input_layernorm.weight": _REPLICATED,
        "model.layers.*.self_attn.[qkv]_proj.weight": _BY_OUTPUT,
        "model.layers.*.self_attn.[qk]_norm.weight": _REPLICATED,
        "model.layers.*.self_attn.o_proj.weight": _BY_INPUT,
        "model.layers.*.post_attention_layernorm.weight": _REPLICATED,
        "model.layers.*.mlp.gate_proj.weight": _BY_OUTPUT,
        "model.layers.*.mlp.up_proj.weight": _BY_OUTPUT,
        "model.layers.*.mlp.down_proj.weight": _BY_INPUT,
        "model.norm.weight": _REPLICATED,
        "lm_head.weight": _BY_OUTPUT,
    }
)
