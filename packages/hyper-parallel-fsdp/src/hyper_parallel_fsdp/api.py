"""``fully_shard``: shard a module's parameters over the data axes of a mesh."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from hyper_parallel import DeviceMesh, Replicate, Shard
from hyper_parallel.rules import replaces_parameters, torch_compat
from hyper_parallel_fsdp.checks import check_device_of, check_no_hooks
from hyper_parallel_fsdp.data_mesh import DataMesh, data_mesh, place
from hyper_parallel_fsdp.module import HSDPModule
from hyper_parallel_fsdp.ownership import first_name, holder_of_tied, managed_as, note_managed, parameters_of
from hyper_parallel_fsdp.parameter import HSDPParam
from hyper_parallel_fsdp.state import _STATE, FullyShardState, state_of

__all__ = ["fully_shard"]

PlacementFn = Callable[[nn.Parameter], Shard | Replicate | None]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    enable_param_shard: bool | None = ...,
) -> HSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    enable_param_shard: bool | None = ...,
) -> list[HSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    enable_param_shard: bool | None = None,
) -> Any:
    """Shard a module's parameters over the data axes of a mesh, in place; PyTorch's ``fully_shard`` for meshes of any
    number of axes.

    Wrap inner modules first (each transformer block, say), then the whole model: the parameters of one call are
    gathered by one all-gather before its forward and backward, and their gradients reduced by one reduce-scatter.
    Parameters that are DTensors already (tensor or expert parallel) keep those placements; each parameter becomes one
    DTensor that carries all of them. Build optimizers afterwards.

    Args:
        module: the module, or a list of modules that are gathered together (tied weights, a norm with the head).
        mesh: the data mesh or the whole mesh; its axis names say what they are for
            (:mod:`hyper_parallel_fsdp.roles`). Default: one axis over all ranks.
        reshard_after_forward: free the parameters between forward and backward, at the price of a second all-gather.
            Default: yes, but not for the root nor for the module whose backward comes first. A number, which divides
            that of the shards: so many neighbouring ranks (of a node, say) keep them together, and the second
            all-gather is among these.
        shard_placement_fn: gives for a parameter the tensor dim to shard, e.g. ``Shard(1)``; ``Replicate()`` keeps it
            whole; None means ``Shard(0)``. Sizes that do not divide are fine.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, their gradients and so the optimizer in host memory.
        ignored_params: parameters to leave alone.
        enable_param_shard: False keeps parameters whole on all data ranks and only reduces their gradients. Default:
            whether the mesh has an axis to shard over; a pure ``tp`` mesh has none.

    Returns:
        The module, now an :class:`HSDPModule` (modules, for a list).

    Raises:
        ValueError: the module is wrapped already or has no forward; the mesh has no axis to shard over though it was
            asked for; a parameter is on another mesh or device, or tied to one that another call manages.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    data = data_mesh(mesh, enable_param_shard)
    reshard_after_forward = _checked_reshard(reshard_after_forward, data)
    device = data.info.default_device()
    offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
    ignored = frozenset(id(p) for p in ignored_params or ())
    state = FullyShardState(modules, data, device, reshard_after_forward, mp_policy, offload, ignored)
    found = parameters_of(modules, ignored)
    shared = [holder_of_tied(each, modules) for each in found]
    home = torch.device("cpu") if offload else device
    for each, holder in zip(found, shared, strict=True):
        check_device_of(each.name, each.parameter, device)
        param = managed_as(each.parameter)
        if holder is not None and param is not None:
            holder.remove(param)
            param.owners += each.owners
            param.name = first_name(param.owners, modules)
        else:
            check_no_hooks(each.name, each.parameter)
            wanted = shard_placement_fn(each.parameter) if shard_placement_fn is not None else None
            placement = place(each.name, each.parameter, data, wanted)
            param = HSDPParam(each.name, each.parameter, each.owners, placement, home)
            note_managed(each.parameter, param)
        state.params.append(param)
    with replaces_parameters(modules, "fully_shard"):
        for param in state.params:
            param.register(param.sharded)
    _move_buffers(modules, device)
    for wrapped in modules:
        _attach(wrapped, state)
    return modules if isinstance(module, (list, tuple)) else module


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard takes a module or a list of modules, got {type(module).__name__}")
        if state_of(module) is not None:
            raise ValueError(
                f"fully_shard: this {type(module).__name__} is wrapped already; wrap a module once (inner modules "
                "before the outer one)"
            )
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"fully_shard: a {type(module).__name__} has no forward before which its parameters could be gathered; "
                "wrap its members, or the module that holds it"
            )


def _checked_reshard(given: Any, data: DataMesh) -> bool | int | None:
    """``reshard_after_forward``: a number that is no part of the shards means one of the other values."""
    if given is None or isinstance(given, bool):
        return given
    shards = math.prod(data.info.shape[axis] for axis in data.roles.shard)
    if not isinstance(given, int) or given < 1 or shards % given:
        raise ValueError(
            f"fully_shard: reshard_after_forward takes True, False, None or a divisor of the {shards} shards, got "
            f"{given!r}"
        )
    if given == 1 and shards > 1:
        warnings.warn(
            "fully_shard: reshard_after_forward=1 keeps the parameters whole on each rank, as False does; True frees "
            "them",
            stacklevel=3,
        )
    return given == shards if given in (1, shards) else given


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in modules:
        for inner in module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None and buffer.device.type not in (device.type, "meta"):
                    inner._buffers[name] = buffer.to(device)


def _attach(module: nn.Module, state: FullyShardState) -> None:
    """Make a module call its state before and after forward, and give it the methods of :class:`HSDPModule`."""
    module.__dict__[_STATE] = state
    module.__class__ = _wrapped_class(type(module))
    module.forward = _in_context(module, state)
    module.register_forward_pre_hook(_not_compiled(state.pre_forward), prepend=True, with_kwargs=True)
    module.register_forward_hook(
        _not_compiled(lambda mod, args, output: state.post_forward(mod, output)), always_call=True
    )
    # State dicts hold the sharded parameters, also between unshard() and reshard().
    module.register_state_dict_pre_hook(lambda mod, prefix, keep_vars: state.reshard())
    module.register_load_state_dict_pre_hook(lambda mod, *args: state.reshard())


def _not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which runs as it is where torch.compile traces the module that calls it."""

    def called(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            torch_compat.graph_break("fully_shard gathers and frees the parameters")
            return torch.compiler.disable(hook)(*args)
        return hook(*args)

    return called


def _in_context(module: nn.Module, state: FullyShardState) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with state.forward_context(module):
            return forward(*args, **kwargs)

    return wrapper


def _wrapped_class(cls: type[nn.Module]) -> type[nn.Module]:
    found = _classes.get(cls)
    if found is None:
        found = _classes[cls] = type(
            f"FSDP{cls.__name__}", (HSDPModule, cls), {"__doc__": cls.__doc__, "__module__": cls.__module__}
        )
    return found


_classes: dict[type[nn.Module], type[nn.Module]] = {}
