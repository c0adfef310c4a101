"""Where each public name lives: strings only, so that ``import hyper_parallel`` imports nothing else."""

from __future__ import annotations

# Modules of core, and the names that ``hyper_parallel`` re-exports from each.
_CORE = {
    "hyper_parallel.tensor.dtensor": ("DTensor",),
    "hyper_parallel.sharding.layout": ("Layout",),
    "hyper_parallel.sharding.mesh": ("DeviceMesh", "init_device_mesh"),
    "hyper_parallel.sharding.placements": ("PackedShard", "Partial", "Placement", "Replicate", "Shard"),
    "hyper_parallel.tensor.distribute": ("distribute_module", "distribute_tensor"),
    "hyper_parallel.api.factories": ("arange", "empty", "full", "ones", "rand", "randn", "zeros"),
    "hyper_parallel.sharding.sharding_plan": ("ShardingPlan",),
    "hyper_parallel.api.shard_module": ("shard_module",),
    "hyper_parallel.api.custom_shard": ("custom_shard",),
    "hyper_parallel.api.dfunction": ("DFunction",),
    "hyper_parallel._rules.op": ("DistributedOp",),
    "hyper_parallel._rules.strategy": ("Strategy", "StrategyOp"),
    "hyper_parallel.registry": ("get_distributed_op", "load_op_table", "register_distributed_op"),
    "hyper_parallel.context": ("SkipDTensorDispatch", "implicit_replication", "redistribute_policy"),
    "hyper_parallel.comm.collectives": ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
    "hyper_parallel.tensor.random": ("manual_seed",),
    "hyper_parallel.api.same_inputs": ("require_same_inputs",),
    "hyper_parallel.comm.trace": ("CommTrace",),
    "hyper_parallel.api.visualize": ("visualize",),
    "hyper_parallel.dispatch.check_results": ("check_results",),
    "hyper_parallel.errors": (
        "CheckpointError",
        "MissingOpError",
        "MissingPluginError",
        "OpConflictError",
        "PluginError",
        "RedistributionError",
        "ResultCheckError",
    ),
}

CORE_MODULE_OF: dict[str, str] = {name: module for module, names in _CORE.items() for name in names}

# Names that our own plugins will provide, only to name the pip package in the error when it is absent. How a name
# resolves when the package is there is the plugin's own word (hook ``hyper_parallel_public_names``), as for any
# third party.
_FIRST_PARTY = {
    "hyper-parallel-fsdp": (
        "CPUOffloadPolicy",
        "DataGroups",
        "FSDPModule",
        "GroupInfo",
        "HSDPModule",
        "HSDPParam",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "UnshardHandle",
        "clip_grad_norm_",
        "fully_shard",
        "hsdp_sync_stream",
        "register_fsdp_forward_method",
    ),
    "hyper-parallel-tp": (
        "AttentionParallel",
        "ColwiseParallel",
        "FusedLinearCrossEntropyLoss",
        "LatentAttentionParallel",
        "LocalCompute",
        "MaskedAddition",
        "NoParallel",
        "ParallelCrossEntropyLoss",
        "ParallelDims",
        "ParallelStyle",
        "PositionwiseParallel",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "all_gather_linear",
        "count_tokens",
        "decoder_ends",
        "expert_mixture",
        "experts_by_features",
        "gated_mlp",
        "gather_tensor_parallel_logits",
        "input_reshard",
        "is_loss_parallel_active",
        "linear_reduce_scatter",
        "load_pretrained",
        "loss_parallel",
        "parallel_report",
        "parallelize",
        "parallelize_module",
        "shard_batch",
    ),
}

FIRST_PARTY_DIST_OF: dict[str, str] = {name: dist for dist, names in _FIRST_PARTY.items() for name in names}
