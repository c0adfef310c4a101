"""What core asks of this plugin: its op tables, and the plans of models that it knows."""

from collections.abc import Mapping, Sequence

from hyper_parallel.plugins import OpTable, hookimpl

HYPER_PARALLEL_API = 1

_PLANS = {
    "deepseek_v3.modeling_deepseek_v3.DeepseekV3ForCausalLM": "deepseek_v3:deepseek_v3_plan",
    "deepseek_v32.modeling_deepseek_v32.DeepseekV32ForCausalLM": "deepseek_v3:deepseek_v32_plan",
    "deepseek_v4.modeling_deepseek_v4.DeepseekV4ForCausalLM": "deepseek_v4:deepseek_v4_plan",
}


@hookimpl
def hyper_parallel_op_tables() -> Sequence[OpTable]:
    return OpTable.all_in_package(__package__, "tables")


@hookimpl
def hyper_parallel_model_plans() -> Mapping[str, str]:
    return {f"transformers.models.{model}": f"{__package__}.plans.{plan}" for model, plan in _PLANS.items()}
