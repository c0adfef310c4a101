"""HyperParallel: distributed tensors and operators for PyTorch, extended by plugins.

Importing this package imports neither torch nor any plugin; each name below is loaded when it is first used. Names
that plugins provide (``fully_shard``, ``ColwiseParallel`` and so on) are reached from here too.
"""

# Type checkers treat a variable of this name as true; typing's own would cost half of this package's import time.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from hyper_parallel._rules.op import DistributedOp as DistributedOp
    from hyper_parallel._rules.strategy import Strategy as Strategy
    from hyper_parallel._rules.strategy import StrategyOp as StrategyOp
    from hyper_parallel.api.custom_shard import custom_shard as custom_shard
    from hyper_parallel.api.dfunction import DFunction as DFunction
    from hyper_parallel.api.factories import arange as arange
    from hyper_parallel.api.factories import empty as empty
    from hyper_parallel.api.factories import full as full
    from hyper_parallel.api.factories import ones as ones
    from hyper_parallel.api.factories import rand as rand
    from hyper_parallel.api.factories import randn as randn
    from hyper_parallel.api.factories import zeros as zeros
    from hyper_parallel.api.same_inputs import require_same_inputs as require_same_inputs
    from hyper_parallel.api.shard_module import shard_module as shard_module
    from hyper_parallel.api.visualize import visualize as visualize
    from hyper_parallel.comm.collectives import all_gather as all_gather
    from hyper_parallel.comm.collectives import all_reduce as all_reduce
    from hyper_parallel.comm.collectives import all_to_all as all_to_all
    from hyper_parallel.comm.collectives import reduce_scatter as reduce_scatter
    from hyper_parallel.comm.trace import CommTrace as CommTrace
    from hyper_parallel.context import SkipDTensorDispatch as SkipDTensorDispatch
    from hyper_parallel.context import implicit_replication as implicit_replication
    from hyper_parallel.context import redistribute_policy as redistribute_policy
    from hyper_parallel.dispatch.check_results import check_results as check_results
    from hyper_parallel.errors import CheckpointError as CheckpointError
    from hyper_parallel.errors import MissingOpError as MissingOpError
    from hyper_parallel.errors import MissingPluginError as MissingPluginError
    from hyper_parallel.errors import OpConflictError as OpConflictError
    from hyper_parallel.errors import PluginError as PluginError
    from hyper_parallel.errors import RedistributionError as RedistributionError
    from hyper_parallel.errors import ResultCheckError as ResultCheckError
    from hyper_parallel.registry import get_distributed_op as get_distributed_op
    from hyper_parallel.registry import load_op_table as load_op_table
    from hyper_parallel.registry import register_distributed_op as register_distributed_op
    from hyper_parallel.sharding.layout import Layout as Layout
    from hyper_parallel.sharding.mesh import DeviceMesh as DeviceMesh
    from hyper_parallel.sharding.mesh import init_device_mesh as init_device_mesh
    from hyper_parallel.sharding.placements import PackedShard as PackedShard
    from hyper_parallel.sharding.placements import Partial as Partial
    from hyper_parallel.sharding.placements import Placement as Placement
    from hyper_parallel.sharding.placements import Replicate as Replicate
    from hyper_parallel.sharding.placements import Shard as Shard
    from hyper_parallel.sharding.sharding_plan import ShardingPlan as ShardingPlan
    from hyper_parallel.tensor.distribute import distribute_module as distribute_module
    from hyper_parallel.tensor.distribute import distribute_tensor as distribute_tensor
    from hyper_parallel.tensor.dtensor import DTensor as DTensor
    from hyper_parallel.tensor.random import manual_seed as manual_seed

    __version__: str

    __all__ = [
        "CheckpointError",
        "CommTrace",
        "DFunction",
        "DTensor",
        "DeviceMesh",
        "DistributedOp",
        "Layout",
        "MissingOpError",
        "MissingPluginError",
        "OpConflictError",
        "PackedShard",
        "Partial",
        "Placement",
        "PluginError",
        "RedistributionError",
        "Replicate",
        "ResultCheckError",
        "Shard",
        "ShardingPlan",
        "SkipDTensorDispatch",
        "Strategy",
        "StrategyOp",
        "all_gather",
        "all_reduce",
        "all_to_all",
        "arange",
        "check_results",
        "custom_shard",
        "distribute_module",
        "distribute_tensor",
        "empty",
        "full",
        "get_distributed_op",
        "implicit_replication",
        "init_device_mesh",
        "load_op_table",
        "manual_seed",
        "ones",
        "rand",
        "randn",
        "redistribute_policy",
        "reduce_scatter",
        "register_distributed_op",
        "require_same_inputs",
        "shard_module",
        "visualize",
        "zeros",
    ]
else:
    # Hidden from type checkers: a visible __getattr__ would make every misspelt name an Any.
    from hyper_parallel import _old_paths
    from hyper_parallel._lazy import attach

    __getattr__, __dir__ = attach(__name__)
    _old_paths.install()
    del attach
