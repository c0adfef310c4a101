"""Small DeepSeek models of ``transformers`` with every kind of layer, a batch for them, and what is compared."""

from __future__ import annotations

import torch
import transformers

from hyper_parallel import DTensor

VOCABULARY = 67
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    **COMMON, "num_hidden_layers": 2, "intermediate_size": 44, "q_lora_rank": 16, "kv_lora_rank": 10,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4, "num_key_value_heads": 4,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
SIZES = {
    "deepseek_v3": LATENT,
    "deepseek_v32": {
        **LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek_v4": {
        **COMMON, "num_hidden_layers": 3, "num_key_value_heads": 1, "q_lora_rank": 16, "qk_rope_head_dim": 4,
        "head_dim": 8, "o_groups": 4, "o_lora_rank": 6, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2,
        "sliding_window": 6, "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
}  # fmt: skip


SEED = 16  # with which no gradient of a single number is a difference of much larger ones


def model_of(family, **changes):
    """A model whose parameters and tables are the same on every call, none of them zero."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("tid2eid"):  # the experts of each token
                buffer.copy_(torch.rand(len(buffer), 4, generator=generator).argsort()[:, :2])
    return model.train()


def batch(length=11):
    """Rows of different length, and a length that no number of ranks divides."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def check_gradients(model, single):
    """Every gradient is that of one device, and there is none where there is none."""
    for (name, got), want in zip(model.named_parameters(), single.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is None:
            continue
        whole = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
        error = (whole - want.grad).norm() / want.grad.norm()
        assert error < 1e-5, (name, error)
