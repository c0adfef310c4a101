"""A model with the kernels that NPU integrations put into it trains as the model without them, sharded or not.

The kernels are those of ``hyper_parallel_ops_deepseek.reference``, in plain PyTorch; the functions replaced are those
that LLaMA-Factory replaces.
"""

from __future__ import annotations

import copy
import importlib
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from hyper_parallel import (
    PackedShard,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    shard_module,
)
from hyper_parallel_ops_deepseek import reference as npu

R = Replicate()
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
PLAN = {
    "model.embed_tokens.weight": (R, Shard(0)),
    "lm_head.weight": (R, Shard(0)),
    "**.self_attn.[qkv]_proj.weight": (R, Shard(0)),
    "**.self_attn.o_proj.weight": (R, Shard(1)),
}
DENSE = {"**.mlp.[gu]*_proj.weight": (R, Shard(0)), "**.mlp.down_proj.weight": (R, Shard(1))}
BY_FEATURE = {"**.experts.gate_up_proj": (R, PackedShard(1, (16, 16))), "**.experts.down_proj": (R, Shard(2))}
BY_EXPERT = {"**.experts.gate_up_proj": (R, Shard(0)), "**.experts.down_proj": (R, Shard(0))}


def norm(self, x):
    return npu.npu_rms_norm(x, self.weight, epsilon=self.variance_epsilon)[0]


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return npu.npu_rotary_mul(q, cos, sin), npu.npu_rotary_mul(k, cos, sin)


def mlp(self, x):
    return self.down_proj(npu.npu_swiglu(torch.cat((self.gate_proj(x), self.up_proj(x)), -1), dim=-1))


def product(x, weight, counts, group_type=0):
    split = {0: 2, 2: 3}[group_type]
    return npu.npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=split, group_type=group_type, group_list_type=1
    )[0]


class Gmm(torch.autograd.Function):
    """The kernel has no derivative of its own: integrations give it one like this."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return product(x, weight, counts)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x = product(grad, weight.transpose(1, 2), ctx.counts)
        return of_x, product(x.T, grad, ctx.counts, group_type=2), None


def experts(self, hidden_states, top_k_index, top_k_weights):
    rows, where = npu.npu_moe_token_permute(hidden_states, top_k_index.to(torch.int32))
    counts = torch.histc(top_k_index.float(), bins=self.num_experts, min=0, max=self.num_experts).long()
    gate_up = Gmm.apply(rows, self.gate_up_proj.transpose(1, 2), counts)
    out = Gmm.apply(npu.npu_swiglu(gate_up), self.down_proj.transpose(1, 2), counts)
    return npu.npu_moe_token_unpermute(out, where, probs=top_k_weights.to(out.dtype))


def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    causal = {"sparse_mode": 2, "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1)}
    out = npu.npu_fusion_attention(query, key, value, query.shape[1], "BNSD", scale=scaling, **causal)[0]
    return out.transpose(1, 2), None


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [("qwen3", DENSE), ("qwen3_moe", BY_FEATURE), ("qwen3_moe", BY_EXPERT)],
    ids=["dense", "experts by feature", "experts by number"],
)
def test_fused_kernels_train_like_the_functions_that_they_replace(kind, plan):
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    twin = copy.deepcopy(model)
    tokens = torch.randint(3, 64, (4, 6))
    want = twin(input_ids=tokens, labels=tokens, use_cache=False).loss
    want.backward()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = distribute_tensor(tokens, mesh, (Shard(0), R), src_data_rank=None)
    modeling = importlib.import_module(type(model).__module__)
    name = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[kind]
    replaced = [(getattr(modeling, f"{name}RMSNorm"), "forward", norm), (modeling, "apply_rotary_pos_emb", rotary)]
    if kind == "qwen3":
        replaced.append((modeling.Qwen3MLP, "forward", mlp))
    else:
        replaced.append((modeling.Qwen3MoeExperts, "forward", experts))
    with ExitStack() as stack:
        mocks = [stack.enter_context(patch.object(owner, key, autospec=True)) for owner, key, _ in replaced]
        for mock, (_, _, function) in zip(mocks, replaced, strict=True):
            mock.side_effect = function
        stack.enter_context(patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": attention}))
        shard_module(model, mesh, ShardingPlan(plan=PLAN | plan))
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        assert all(mock.called for mock in mocks)
    torch.testing.assert_close(loss.full_tensor(), want, rtol=1e-5, atol=1e-6)
    for key, parameter in model.named_parameters():
        plain = twin.get_parameter(key).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), plain, rtol=1e-4, atol=1e-6, msg=key)
