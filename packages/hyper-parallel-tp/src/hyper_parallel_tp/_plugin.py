"""What core asks of this plugin: where its public names are, and the plans of models that it knows."""

from collections.abc import Mapping

from hyper_parallel.plugins import hookimpl

HYPER_PARALLEL_API = 1

_NAMES = {
    "hyper_parallel_tp.styles.attention": ("AttentionParallel",),
    "hyper_parallel_tp.input_reshard": ("input_reshard",),
    "hyper_parallel_tp.styles.latent_attention": ("LatentAttentionParallel",),
    "hyper_parallel_tp.styles.local_compute": ("LocalCompute",),
    "hyper_parallel_tp.styles.masked_addition": ("MaskedAddition",),
    "hyper_parallel_tp.loss.loss_parallel": (
        "gather_tensor_parallel_logits",
        "is_loss_parallel_active",
        "loss_parallel",
    ),
    "hyper_parallel_tp.loss.losses": ("FusedLinearCrossEntropyLoss", "ParallelCrossEntropyLoss", "count_tokens"),
    "hyper_parallel_tp.overlap.overlapped_linear": ("all_gather_linear", "linear_reduce_scatter"),
    "hyper_parallel_tp.models.load_pretrained": ("load_pretrained",),
    "hyper_parallel_tp.models.parallelize": ("parallelize",),
    "hyper_parallel_tp.models.parallel_report": ("parallel_report",),
    "hyper_parallel_tp.models.shard_batch": ("shard_batch",),
    "hyper_parallel_tp.parallel_dims": ("ParallelDims",),
    "hyper_parallel_tp.plans.parts": ("decoder_ends", "expert_mixture", "experts_by_features", "gated_mlp"),
    "hyper_parallel_tp.parallelize": ("parallelize_module",),
    "hyper_parallel_tp.styles.positionwise": ("PositionwiseParallel",),
    "hyper_parallel_tp.styles.prepare": ("PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"),
    "hyper_parallel_tp.styles.colwise_rowwise": ("ColwiseParallel", "RowwiseParallel"),
    "hyper_parallel_tp.styles.sequence_parallel": ("NoParallel", "SequenceParallel"),
    "hyper_parallel_tp.styles.style": ("ParallelStyle",),
}

_PLANS = {
    "gpt_oss.modeling_gpt_oss.GptOssForCausalLM": "gpt_oss:gpt_oss_plan",
    "llama.modeling_llama.LlamaForCausalLM": "decoders:llama3_plan",
    "qwen3.modeling_qwen3.Qwen3ForCausalLM": "decoders:qwen3_plan",
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLForConditionalGeneration": "decoders:qwen3_vl_plan",
}


@hookimpl
def hyper_parallel_public_names() -> Mapping[str, str]:
    return {name: module for module, names in _NAMES.items() for name in names}


@hookimpl
def hyper_parallel_model_plans() -> Mapping[str, str]:
    return {f"transformers.models.{model}": f"hyper_parallel_tp.plans.{plan}" for model, plan in _PLANS.items()}
