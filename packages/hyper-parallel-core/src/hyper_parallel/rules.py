"""The API of plugin authors: everything of core that an op pack, a parallel style or a training wrapper may import.

Names listed here keep their meaning between releases of one minor version (docs/rules-api.md says what each is for and
since when it is here); modules of core under other names may move at any time. DTensor, Layout, placements and the
other names that users write come from ``hyper_parallel`` itself. Op tables name the rule families by this module:

    torch.ops.acme.squared_relu: {distributed_op_module: hyper_parallel.rules, distributed_op_class: Elementwise}
"""

# What a rule is
from hyper_parallel._rules.call import Call, Ref, Signature, Solution, normal_dim, refuse
from hyper_parallel._rules.op import DistributedOp, FunctionOp, OpSummary
from hyper_parallel._rules.strategy import LayoutOp, P, R, S, Strategy, StrategyOp

# Families of rules, for op tables and as base classes
from hyper_parallel._rules.families.contraction import (
    AddMatMul,
    Einsum,
    Linear,
    MatMul,
    contraction_shape,
    contraction_strategies,
)
from hyper_parallel._rules.families.elementwise import Division, Elementwise, broadcast_shape, extremes, shard_if_full
from hyper_parallel._rules.families.listed import Listed
from hyper_parallel._rules.families.reduction import Mean, Product, Reduction, Sum, keeps_sums, mean_term
from hyper_parallel._rules.families.views import Complex, Contiguous, DimMap, Expand, Reshape, View
from hyper_parallel._rules.families.whole_dims import Dealt, WholeDims

# Helpers of rules that communicate
from hyper_parallel._rules.families.derivatives import first_derivative_only
from hyper_parallel._rules.families.empty_shards import zeros_from
from hyper_parallel._rules.families.exchange import NOTHING, ExchangePlan, Moving, indices_of, pending_rows, plain
from hyper_parallel._rules.families.held_indices import (
    HeldIndices,
    check_in_range,
    locate,
    one_row_more,
    pending_lookup,
)
from hyper_parallel._rules.families.keeping import kept
from hyper_parallel._rules.families.over_axes import OverAxes, global_indices
from hyper_parallel._rules.families.overwriting import overwrite
from hyper_parallel._rules.families.precision import LOW, casts_by_term, wide, wide_dtype
from hyper_parallel._rules.families.ranges import Kept, Overlap, keep_range, merged, overlaps
from hyper_parallel.comm import primitives
from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.comm.redistribute import (
    Redistribution,
    describe,
    move_of,
    moved,
    target_spec,
    transition,
    varying_axes,
)
from hyper_parallel.comm.reduce_ops import norm_op
from hyper_parallel.comm.steps import Pending
from hyper_parallel.comm.trace import described, is_tracing

# Meshes, layouts and what a rank holds
from hyper_parallel.sharding.layout import as_layout, device_type_of_backend, fit_rank
from hyper_parallel.sharding.mesh import AxisGroup, MeshInfo, mesh_info, root_mesh
from hyper_parallel.sharding.placements import is_partial, is_replicate, is_shard, on_dim
from hyper_parallel.sharding.shard_ranges import Intervals, box, chunk_bounds, dim_intervals, length, local_shape
from hyper_parallel.sharding.spec import (
    NOT_VARYING,
    Spec,
    contiguous_stride,
    in_memory_order,
    make_spec,
    memory_order,
)
from hyper_parallel.sharding.stated import as_stated

# DTensors from the inside
from hyper_parallel.context import in_backward, state
from hyper_parallel.dispatch.arguments import replica_spec
from hyper_parallel.dispatch.dispatcher import dispatch
from hyper_parallel.dispatch.gradient_types import vary_axes
from hyper_parallel.tensor.autograd_bridge import gradient_paths
from hyper_parallel.tensor.distribute import as_parameter, replicate_rest
from hyper_parallel.tensor.dtensor import wrap
from hyper_parallel.tensor.given_memory import local_of
from hyper_parallel.tensor.in_place import before_write
from hyper_parallel.tensor.random import check_generators, draw, embedded, local_part
from hyper_parallel.tensor.joint_gradients import join_gradients
from hyper_parallel.tensor.redistribute_cache import remembered
from hyper_parallel.tensor.replaced_parameters import note_replaced, replaces_parameters
from hyper_parallel.tensor.views import carry, has_copies, root_of

# What torch has under private names
from hyper_parallel import torch_compat

# Modules
from hyper_parallel.api.module_boundary import Boundary, map_dtensors, taken_as
from hyper_parallel.api.same_inputs import check_first_inputs, check_same_tensors
from hyper_parallel.api.replace_forward import forward_function, replicate_plain_inside, set_forward
from hyper_parallel.api.shard_module import matcher, matching
from hyper_parallel.utils.structures import change_values, map_structure, map_tensors, tensors_of

__all__ = [
    "AddMatMul",
    "AxisGroup",
    "Boundary",
    "Call",
    "Complex",
    "Contiguous",
    "Dealt",
    "DimMap",
    "DistributedOp",
    "Division",
    "Einsum",
    "Elementwise",
    "ExchangePlan",
    "Expand",
    "FunctionOp",
    "HeldIndices",
    "Intervals",
    "Kept",
    "LOW",
    "LayoutOp",
    "Linear",
    "Listed",
    "MatMul",
    "Mean",
    "MeshInfo",
    "Moving",
    "NOTHING",
    "NOT_VARYING",
    "OpSummary",
    "OverAxes",
    "Overlap",
    "P",
    "Pending",
    "Product",
    "R",
    "Redistribution",
    "Reduction",
    "Ref",
    "Reshape",
    "S",
    "Signature",
    "Solution",
    "Spec",
    "Strategy",
    "StrategyOp",
    "Sum",
    "View",
    "WholeDims",
    "as_layout",
    "as_parameter",
    "as_stated",
    "before_write",
    "box",
    "broadcast_shape",
    "carry",
    "casts_by_term",
    "change_values",
    "check_first_inputs",
    "check_same_tensors",
    "check_generators",
    "check_in_range",
    "chunk_bounds",
    "contiguous_stride",
    "contraction_shape",
    "contraction_strategies",
    "describe",
    "described",
    "device_type_of_backend",
    "dim_intervals",
    "dispatch",
    "draw",
    "embedded",
    "extremes",
    "first_derivative_only",
    "fit_rank",
    "forward_function",
    "global_indices",
    "gradient_paths",
    "has_copies",
    "in_backward",
    "in_memory_order",
    "indices_of",
    "is_partial",
    "is_replicate",
    "is_shard",
    "is_tracing",
    "join_gradients",
    "keep_range",
    "keeps_sums",
    "kept",
    "length",
    "local_of",
    "local_part",
    "local_shape",
    "locate",
    "make_spec",
    "map_dtensors",
    "map_structure",
    "map_tensors",
    "matcher",
    "matching",
    "mean_term",
    "memory_order",
    "merged",
    "mesh_info",
    "move_of",
    "moved",
    "norm_op",
    "normal_dim",
    "note_replaced",
    "on_dim",
    "one_row_more",
    "overlaps",
    "overwrite",
    "pending_lookup",
    "pending_rows",
    "plain",
    "plan_transition",
    "primitives",
    "refuse",
    "remembered",
    "replaces_parameters",
    "replica_spec",
    "replicate_plain_inside",
    "replicate_rest",
    "root_mesh",
    "root_of",
    "set_forward",
    "shard_if_full",
    "state",
    "taken_as",
    "target_spec",
    "tensors_of",
    "torch_compat",
    "transition",
    "vary_axes",
    "varying_axes",
    "wide",
    "wide_dtype",
    "wrap",
    "zeros_from",
]
