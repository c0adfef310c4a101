"""What core asks of this plugin: its op tables, and the plans of models that it knows."""

from collections.abc import Mapping, Sequence

from hyper_parallel.plugins import OpTable, hookimpl

HYPER_PARALLEL_API = 1


@hookimpl
def hyper_parallel_op_tables() -> Sequence[OpTable]:
    return OpTable.all_in_package(__package__, "tables")


_PLANS = {
    "qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM": "qwen3_moe:qwen3_moe_plan",
    "qwen3_next.modeling_qwen3_next.Qwen3NextForCausalLM": "qwen3_next:qwen3_next_plan",
    "qwen3_5.modeling_qwen3_5.Qwen3_5ForCausalLM": "qwen3_5:qwen3_5_plan",
    "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeForCausalLM": "qwen3_5:qwen3_5_moe_plan",
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration": "with_vision:qwen3_vl_moe_plan",
    "qwen3_5.modeling_qwen3_5.Qwen3_5ForConditionalGeneration": "with_vision:qwen3_5_vl_plan",
    "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeForConditionalGeneration": "with_vision:qwen3_5_moe_vl_plan",
}


@hookimpl
def hyper_parallel_model_plans() -> Mapping[str, str]:
    return {f"transformers.models.{model}": f"{__package__}.plans.{plan}" for model, plan in _PLANS.items()}
