"""All of torch that has no public name, and all that is changed in torch: read in torch 2.13.

The other modules, and those of our packages, take private names from here, so that a new version of torch is compared
with one file. :data:`CHANGES` lists what is changed when the first mesh is used by a layout, since there is no DTensor
before (:mod:`hyper_parallel.tensor.torch_changes` and the registry do it), :data:`OTHER_CHANGES` the rest. Importing
HyperParallel changes nothing in torch.

Operators that torch calls private (``torch._foreach_add``, ``torch._grouped_mm``) are no part of this: op tables name
them, and a table's entry for a function that is gone does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.nn import _reduction as loss_reduction
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as outside_of_dispatch_modes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _FileSystemWriter as FileSystemWriter

__all__ = [
    "CHANGES",
    "OTHER_CHANGES",
    "READ_IN",
    "AccumulateGrad",
    "Change",
    "DisableTorchFunction",
    "FileSystemWriter",
    "OpOverload",
    "OpOverloadPacket",
    "ThreadedGroups",
    "TorchDispatchMode",
    "assert_async",
    "change_torch",
    "checkpoint_classes",
    "chunk_cat",
    "current_mesh",
    "current_task",
    "default_store",
    "fake_store",
    "forget_groups",
    "get_memory_layout",
    "graph_break",
    "group_count",
    "has_compatible_copy_type",
    "keeps_graph",
    "lazy_clone",
    "loss_reduction",
    "make_wrapper_subclass",
    "new_dtensor",
    "new_local_group",
    "object_device",
    "outside_of_dispatch_modes",
    "private_functions",
    "pytree",
    "queue_callback",
    "refuse_graph",
    "refuse_memory",
    "root_of_mesh",
    "run_backward",
    "sequence_number",
    "show_dynamo",
    "skip_frames",
    "skip_package",
    "swap_tensor_impl",
    "threaded_groups",
    "truncated_normal_by",
    "will_run",
]

READ_IN = "2.13"
"""The version of torch in which every name below was read."""

_C: Any = torch._C
_c10d: Any = dist.distributed_c10d

# -- names ----------------------------------------------------------------------------------------------------------

DisableTorchFunction = _C.DisableTorchFunctionSubclass
"""Context in which torch functions on DTensors reach the C++ tensor instead of ``__torch_function__``."""

AccumulateGrad = _C._functions.AccumulateGrad
"""The autograd node that writes a leaf's ``.grad``."""

swap_tensor_impl = _C._swap_tensor_impl
"""Exchange the C++ tensors of two Python objects; unlike ``torch.utils.swap_tensors`` not their attributes."""

keeps_graph = _C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs was called with ``retain_graph``."""

current_task = _C._current_graph_task_id
"""Number of the backward that runs on this thread; -1 outside of one."""

sequence_number = _C._autograd._get_sequence_nr
"""The number that the next autograd node of this thread gets."""

will_run = _C._will_engine_execute_node
"""Whether the backward that runs will reach an autograd node."""

refuse_memory: Callable[[torch.Tensor], None] = _C._set_throw_on_mutable_data_ptr
"""Let C++ code that asks a new tensor without data for its memory raise, where it would get a null pointer."""

assert_async = torch._assert_async
"""Raise when a tensor is false: on accelerators later, without waiting."""

lazy_clone: Callable[[torch.Tensor], torch.Tensor] = torch._lazy_clone
"""A copy that is made when one of the two is written."""

get_memory_layout: Any = torch.serialization._get_layout
"""What pickles of a ``torch.layout`` name."""

chunk_cat = torch._chunk_cat
"""Concatenate tensors chunk by chunk, as a reduce-scatter of several gradients wants them."""

has_compatible_copy_type: Any = torch._has_compatible_shallow_copy_type
"""The function by which ``Module.to`` asks whether it may set a parameter's ``.data``."""


make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
"""Make a tensor of a subclass that has a shape and no data."""

new_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", None)
"""The constructor of PyTorch's own DTensor, which does the same in C++; None where there is none."""

queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
"""Call a function when the backward that runs has ended."""

default_store = _c10d._get_default_store
"""The store of the default process group, which lives as long as the world does."""

object_device = _c10d._get_object_coll_device
"""The device on which the default group's backend exchanges Python objects."""


def group_count() -> int:
    """Number of process groups that this process has."""
    return len(_c10d._world.pg_map)


_local_groups: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
"""Per world, how many groups :func:`new_local_group` has made of the same ranks."""


def new_local_group(ranks: list[int], timeout: timedelta | None) -> Any:
    """``torch.distributed.new_group`` with local synchronisation, also on ranks that are in unequally many groups.

    The members find each other by the group's name, into which torch puts how many groups this process has
    (``_hash_ranks_to_str``): members of which one is in another group besides would wait for each other until the
    time limit. Here the name says how many groups were made of just these ranks, which all of them know.
    """
    made = _local_groups.setdefault(dist.group.WORLD, {})
    name = "_".join(map(str, sorted(ranks)))
    made[name] = made.get(name, 0) + 1
    if _c10d._hash_ranks_to_str is not _group_name:
        _c10d._hash_ranks_to_str = _group_name
    _group_to_make.name = f"hyper_parallel {name} {made[name]}"
    try:
        return dist.new_group(sorted(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        _group_to_make.name = None


_group_to_make = threading.local()  # its attribute "name", while this thread makes a local group
_torchs_group_name = _c10d._hash_ranks_to_str


def _group_name(ranks: list[int]) -> str:
    name: str | None = getattr(_group_to_make, "name", None)
    if name is None:
        return _torchs_group_name(ranks)
    return hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()


def graph_break(reason: str) -> None:
    """End the graph that torch.compile traces here."""
    torch._dynamo.graph_break(msg=reason)


def skip_frames(code: Any) -> None:
    """Let Dynamo trace neither frames of a code object nor what they call; no cost where nothing is compiled."""
    eval_frame: Any = _C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def skip_package(trace_rules: Any, name: str) -> None:
    """Let Dynamo skip the files of a package, given its module ``torch._dynamo.trace_rules``."""
    trace_rules.add(name)


def show_dynamo(builder: Any, kind: type[Any], how: Callable[[Any, Any], Any]) -> None:
    """Let Dynamo see values of a class by ``how(builder, value)``, given ``torch._dynamo.variables.builder``."""
    for with_numpy in (False, True):
        builder.VariableBuilder._type_dispatch_impl(with_numpy)[kind] = how


def refuse_graph(kind: str, context: str, reason: str) -> None:
    """Raise what Dynamo raises where it cannot go on in one graph."""
    from torch._dynamo.exc import unimplemented  # Dynamo is there when it asks

    unimplemented(gb_type=kind, context=context, explanation=reason, hints=[])


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:`` block.

    Raises:
        RuntimeError: outside of one.
    """
    return _mesh_resources.get_current_mesh()


def root_of_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from, or itself."""
    return mesh._get_root_mesh()


def forget_groups(mesh: DeviceMesh) -> None:
    """Let a mesh hold no process groups any more."""
    mesh._pg_registry.clear()


def private_functions() -> tuple[Any, ...]:
    """Modules with the native halves of functions of ``torch.nn.functional``, ``linalg``, ``fft`` and ``special``."""
    return _C._nn, _C._linalg, _C._fft, _C._special


def __getattr__(name: str) -> Any:
    if name == "FileSystemWriter":  # the writer without caching; only checkpoints load torch.distributed.checkpoint
        from torch.distributed.checkpoint.filesystem import _FileSystemWriter

        return _FileSystemWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def checkpoint_classes() -> tuple[Any, ...]:
    """Classes without a public name in the metadata of a distributed checkpoint."""
    from torch.distributed.checkpoint import filesystem, metadata  # only checkpoints load them

    return metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, filesystem._StoragePrefix


@contextlib.contextmanager
def truncated_normal_by(fill: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, ``torch.nn.init.trunc_normal_`` calls ``fill(draw, tensor, mean, std, a, b, generator=...)``; by
    ``draw`` it does what it did before."""
    module: Any = torch.nn.init
    draw = module._no_grad_trunc_normal_
    module._no_grad_trunc_normal_ = functools.partial(fill, draw)
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = draw


def fake_store() -> Any:
    """The store of a process group whose collectives return at once, for worlds of ranks that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # it brings the backend "fake"

    return FakeStore()


@dataclass(frozen=True)
class ThreadedGroups:
    """PyTorch's process groups of threads, which its own tests use.

    Attributes:
        module: whose functions are replaced where ranks wait for each other.
        isolate: makes the world a thread's own, or the process's again.
    """

    module: Any
    isolate: Callable[[bool], None]
    group: Any
    install: Callable[[], Any]
    uninstall: Callable[[], None]


def threaded_groups() -> ThreadedGroups:
    """What worlds of threads are made of.

    Raises:
        ImportError, AttributeError: this torch does not have it, or under other names.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as module  # for tests only

    return ThreadedGroups(
        module,
        _C._distributed_c10d._set_thread_isolation_mode,
        module.ProcessLocalGroup,
        module._install_threaded_pg,
        module._uninstall_threaded_pg,
    )


# -- changes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Something of torch that is changed.

    Attributes:
        where: the name that gets another value.
        why: what would be wrong otherwise.
    """

    where: str
    why: str


_ISINSTANCE = "it asks isinstance(value, torch.distributed.tensor.DTensor) and would keep shards as if they were whole"
CHANGES = (
    Change("torch.optim.optimizer._foreach_supported_types", "optimizers would not choose their foreach form"),
    Change(
        "torch.utils._foreach_utils._foreach_supported_types", "gradient clipping would not choose its foreach form"
    ),
    Change("torch.autograd.Function.__init_subclass__", "kernels of known packages would be given a DTensor"),
    Change("torch.nn.RNNBase.flatten_parameters", "it asks sharded weights for their memory"),
    Change("torch.utils.dlpack.to_dlpack", "it would hand out memory that a DTensor does not have"),
    Change("torch.to_dlpack", "it is the same function"),
    Change("torch.utils.swap_tensors", "it refuses tensors with weak references, which parameters have"),
    Change("torch.testing._comparison.TensorLikePair._check_supported", "it does not know a DTensor's layout"),
    Change("torch.testing._comparison.TensorLikePair._compare_values", "it would redistribute to say what differs"),
    Change("torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor", "it copies by memory"),
    Change("torch._dynamo.trace_rules.SKIP_DIRS", "Dynamo would trace our code, and guard on nothing that changes"),
    Change("torch._dynamo.variables.builder.VariableBuilder", "it could not say why a DTensor is in no graph"),
    Change("torch.distributed._state_dict_utils._gather_state_dict", _ISINSTANCE),
    Change("torch.distributed._state_dict_utils._distribute_state_dict", _ISINSTANCE),
    Change("torch.distributed._state_dict_utils._broadcast_state_dict", _ISINSTANCE),
)
"""When the first mesh is used; of modules that are not imported then, when they are."""

OTHER_CHANGES = (
    Change("torch.distributed.nn.functional.*.__defaults__", "a group would live on after destroy_process_group()"),
    Change("torch.distributed.distributed_c10d._hash_ranks_to_str", "ranks in unequally many groups would wait"),
    Change("torch.autograd.Function.apply of classes that an op table names", "no rule would see their calls"),
    Change("torch.autograd.Function.apply of classes of kernel libraries", "kernels would be given a DTensor"),
    Change("transformers.PreTrainedModel.resize_token_embeddings", "it would make embeddings of one device"),
    Change("transformers.PreTrainedModel.save_pretrained", "all ranks write its files together"),
)
"""At other times, or in other libraries: when groups are destroyed, when those classes and libraries are imported."""

_STATE_DICT_USER = "torch.distributed.checkpoint.state_dict"  # which imports the functions by name
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def change_torch(kind: type[Any], state_dict_functions: Mapping[str, Wrap]) -> None:
    """Make the changes that no other module wraps a function of its own for.

    Args:
        kind: the class that optimizers and gradient clipping treat as they do torch.Tensor.
        state_dict_functions: what each of the three functions of state dicts is wrapped in.
    """
    _optimizer._foreach_supported_types.append(kind)  # type: ignore[arg-type]
    _foreach_utils._foreach_supported_types.append(kind)
    for name, wrap in state_dict_functions.items():
        wrapped = wrap(getattr(_state_dict_utils, name))
        setattr(_state_dict_utils, name, wrapped)
        if _STATE_DICT_USER in sys.modules:
            setattr(sys.modules[_STATE_DICT_USER], name, wrapped)
