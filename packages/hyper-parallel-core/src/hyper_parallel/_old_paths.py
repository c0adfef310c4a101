"""Modules under the names that they had before they moved into folders.

Pickles and checkpoints name them (``hyper_parallel.layout``), and so may other people's code and op tables
(``hyper_parallel.families.elementwise``). Importing an old name gives the module itself, not a copy.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # typing's own would cost half of the package's import time
if TYPE_CHECKING:
    import types
    from collections.abc import Sequence

_PREFIX = "hyper_parallel."

MOVED = {
    "after_import": "utils.import_hooks",
    "function_names": "utils.function_names",
    "structures": "utils.structures",
    "boxes": "sharding.shard_ranges",
    "group_life": "sharding.group_lifetime",
    "layout": "sharding.layout",
    "mesh": "sharding.mesh",
    "placements": "sharding.placements",
    "spec": "sharding.spec",
    "collectives": "comm.collectives",
    "comm_trace": "comm.trace",
    "redistribute": "comm.redistribute",
    "steps": "comm.steps",
    "transition": "comm.planner",
    "wire": "comm.reduce_ops",
    "call": "_rules.call",
    "families": "_rules.families",
    "matching": "_rules.matching",
    "op": "_rules.op",
    "strategy": "_rules.strategy",
    "families.contraction": "_rules.families.contraction",
    "families.derivatives": "_rules.families.derivatives",
    "families.elementwise": "_rules.families.elementwise",
    "families.empty_pieces": "_rules.families.empty_shards",
    "families.held_indices": "_rules.families.held_indices",
    "families.listed": "_rules.families.listed",
    "families.moving": "_rules.families.exchange",
    "families.over_axes": "_rules.families.over_axes",
    "families.overwriting": "_rules.families.overwriting",
    "families.precision": "_rules.families.precision",
    "families.ranges": "_rules.families.ranges",
    "families.reduction": "_rules.families.reduction",
    "families.reshaping": "_rules.families.reshaping",
    "families.views": "_rules.families.views",
    "families.whole_dims": "_rules.families.whole_dims",
    "autograd_bridge": "tensor.autograd_bridge",
    "checkpoint.blocks": "tensor.dcp_protocol",
    "conversion": "tensor.redistribute_cache",
    "distribute": "tensor.distribute",
    "dtensor": "tensor.dtensor",
    "in_place": "tensor.in_place",
    "local_pieces": "tensor.from_local_checks",
    "random": "tensor.random",
    "replaced_parameters": "tensor.replaced_parameters",
    "shared_memory": "tensor.views",
    "torch_interop": "tensor.torch_interop",
    "torch_state_dicts": "tensor.torch_state_dicts",
    "wrapper": "tensor.wrapper",
    "wrapper_graph": "tensor.autograd_graph",
    "op_table": "plugins.op_table",
    "op_table_reader": "plugins.op_table_reader",
    "fingerprint": "registry.fingerprint",
    "foreign_functions": "registry.autograd_functions",
    "function_index": "registry.function_index",
    "op_entry": "registry.op_entry",
    "registry_messages": "registry.messages",
    "arguments": "dispatch.arguments",
    "cache_key": "dispatch.cache_key",
    "changes": "dispatch.redistribute_inputs",
    "dispatcher": "dispatch.dispatcher",
    "meshes": "dispatch.cross_mesh",
    "metadata": "dispatch.ops_without_rule",
    "plan": "dispatch.plan",
    "three_phases": "dispatch.three_phase_rules",
    "boundary": "api.module_boundary",
    "dfunction": "api.dfunction",
    "factories": "api.factories",
    "forwards": "api.replace_forward",
    "function_sharding": "api.custom_shard",
    "module_sharding": "api.shard_module",
    "same_inputs": "api.same_inputs",
    "visualization": "api.visualize",
}
"""Old name to new one, both below ``hyper_parallel``."""


class _OldPaths:
    """Finds old names; comes before other finders, which would load modules of a moved package a second time."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(_PREFIX) and name[len(_PREFIX) :] in MOVED:
            # A Loader by its methods: importlib.abc would double what importing this package costs.
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(_PREFIX + MOVED[spec.name[len(_PREFIX) :]])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state  # the module's own, which the import system has just replaced


def install() -> None:
    """Make the old names importable."""
    sys.meta_path.insert(0, _OldPaths())
