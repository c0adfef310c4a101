"""Small models of ``transformers``, one of each family, and batches for them.

Everything special about a family is there (delta layers beside full attention, dense layers beside experts, vision
blocks, sinks), and nothing is zero that could be: a bias that is added once per rank shows only where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_SIZES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32,
}  # fmt: skip
LATENT_SIZES = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
INDEXER_SIZES = {
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 6, "layer_types": ["indexed_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
COMPRESSED_SIZES = {  # one latent head for all queries
    "num_key_value_heads": 1, "q_lora_rank": 32, "qk_rope_head_dim": 8, "head_dim": 16, "o_groups": 4,
    "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "intermediate_size": 32, "moe_intermediate_size": 32,
    "sliding_window": 8, "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "mlp_layer_types": ["hash_moe", "moe"],
}  # fmt: skip
SINK_SIZES = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
SPECIAL_TOKENS = {
    "image_token_id": 124, "video_token_id": 125, "vision_start_token_id": 126, "vision_end_token_id": 127,
}  # fmt: skip
FIRST_TOKEN, LAST_TOKEN = 3, 120
"""Of text: between the padding and the special tokens."""

AUXILIARY = 0.05
"""Coefficient of the routers' auxiliary loss: large enough that its gradient is no rounding."""


def with_vision(text: Mapping[str, Any], vision: Mapping[str, Any] = VISION) -> dict[str, Any]:
    """The configuration of a model of text and pictures."""
    return {"text_config": dict(text), "vision_config": dict(vision), **SPECIAL_TOKENS}


@dataclass(frozen=True)
class Model:
    """A model of the zoo.

    Attributes:
        model_type: its name in ``transformers``.
        sizes: of its configuration.
        experts: whether it has some.
        auxiliary: whether its routers have an auxiliary loss.
        recurrent: whether it has layers whose rounding grows along the sequence.
        images: whether it takes pictures.
    """

    model_type: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    experts: bool = False
    auxiliary: bool = False
    recurrent: bool = False
    images: bool = False

    def config(self) -> Any:
        import transformers

        known = {**SIZES, **self.sizes} if not self.images else dict(self.sizes)
        config = transformers.AutoConfig.for_model(self.model_type, **known)
        text = config.get_text_config()
        text.initializer_range = 0.1
        if self.auxiliary:
            text.router_aux_loss_coef, text.output_router_logits = AUXILIARY, True
        return config

    def build(self, dtype: torch.dtype = torch.float32, experts: str | None = None) -> torch.nn.Module:
        """The model, with the same values in every process.

        Args:
            experts: the form in which they are computed, where the model has some.
        """
        import transformers

        config = self.config()
        auto = transformers.AutoModelForImageTextToText if self.images else transformers.AutoModelForCausalLM
        torch.manual_seed(0)
        model: torch.nn.Module = auto.from_config(config, dtype=dtype)
        if experts is not None:
            model.set_experts_implementation(experts)
        for parameter in model.parameters():
            if parameter.ndim < 2:  # biases, scales of norms, sinks, decays
                parameter.data += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
            if name.endswith("tid2eid"):  # experts by token
                buffer.copy_(torch.rand(len(buffer), EXPERTS["num_experts"]).argsort(dim=1)[:, : buffer.shape[1]])
        return model.to(dtype).train()


_DELTA_EXPERTS = {**DELTA_SIZES, **EXPERTS}
_BOTH = {"experts": True, "auxiliary": True}

MODELS = {
    "llama": Model("llama"),
    "qwen3": Model("qwen3"),
    "qwen3_moe": Model("qwen3_moe", EXPERTS, **_BOTH),
    "qwen3_next": Model("qwen3_next", _DELTA_EXPERTS, recurrent=True, **_BOTH),
    "qwen3_5": Model("qwen3_5_text", DELTA_SIZES, recurrent=True),
    "qwen3_5_vl": Model("qwen3_5", with_vision({**SIZES, **DELTA_SIZES}), recurrent=True, images=True),
    "qwen3_5_moe": Model("qwen3_5_moe_text", _DELTA_EXPERTS, recurrent=True, **_BOTH),
    "qwen3_5_moe_vl": Model(
        "qwen3_5_moe", with_vision({**SIZES, **_DELTA_EXPERTS}), recurrent=True, images=True, **_BOTH
    ),
    "qwen3_vl": Model("qwen3_vl", with_vision(SIZES), images=True),
    "qwen3_vl_moe": Model("qwen3_vl_moe", with_vision({**SIZES, **EXPERTS}), images=True, **_BOTH),
    "deepseek_v3": Model("deepseek_v3", LATENT_SIZES, experts=True),
    "deepseek_v32": Model("deepseek_v32", {**LATENT_SIZES, **INDEXER_SIZES}, experts=True),
    "deepseek_v4": Model("deepseek_v4", COMPRESSED_SIZES, **_BOTH),
    "gpt_oss": Model("gpt_oss", SINK_SIZES, **_BOTH),
}
"""By the name of the family."""


def batch_of(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """A batch, the same in every process.

    Args:
        kind: ``"plain"``: 4 rows with equally many labels; ``"padding"``: with rows of other lengths; ``"uneven"``: 7
            rows of 13 tokens, a number that no mesh divides, of which some have no label; ``"images"``: a picture in
            each row, of two sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, length = (7, 13) if kind == "uneven" else (4, 16)
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (rows, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "uneven":
        batch["labels"][0, :9] = batch["labels"][3, 4:] = -100
    if kind == "padding":
        lengths = torch.tensor([16, 5, 11, 8]).unsqueeze(1)
        mask = (torch.arange(length) < lengths).long()
        ids.mul_(mask)
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "images":
        batch |= _pictures(ids, generator)
    return batch


def _pictures(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Pictures of 4 x 4 and 4 x 8 patches, four of which make a token; their places are written into the ids."""
    widths = [4, 8] * (len(ids) // 2)
    for row, width in enumerate(widths):
        ids[row, row], ids[row, row + 1 : row + 1 + width], ids[row, row + 1 + width] = 126, 124, 127
    return {
        "labels": ids.clone(),
        "mm_token_type_ids": (ids == 124).int(),
        "pixel_values": torch.randn(4 * sum(widths), 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, width] for width in widths]),
    }
