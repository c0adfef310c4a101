"""Errors that name the parameter and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hyper_parallel import DTensor
from hyper_parallel_fsdp.parameter import HSDPParam, has_hooks


def check_devices(params: Iterable[HSDPParam], device: torch.device, offloaded: bool) -> None:
    """Raise unless every shard is where the mesh, or the offload policy, wants it."""
    wanted = "cpu" if offloaded else device.type
    for param in params:
        found = param.local.device.type
        if found == "meta":
            raise RuntimeError(
                f"parameter {param.name!r} is on the meta device: call model.to_empty(device={wanted!r}) and "
                "initialise the parameters (or load a state dict) before the first forward"
            )
        if found != wanted:
            why = "CPUOffloadPolicy keeps it there" if offloaded else "the device of the mesh"
            raise RuntimeError(
                f"parameter {param.name!r} is on {found!r}, expected {wanted!r} ({why}); call model.to({wanted!r})"
            )


def check_device_of(name: str, parameter: torch.Tensor, device: torch.device) -> None:
    """Raise when a parameter is on an accelerator that is not the mesh's."""
    found = parameter.device
    other_index = found.type == device.type and None not in (found.index, device.index) and found.index != device.index
    if found.type not in ("cpu", "meta", device.type) or other_index:
        raise ValueError(
            f"fully_shard: parameter {name!r} is on {found}, but this rank's device of the mesh is {device}; move the "
            f"module with module.to({str(device)!r}) first, or make the mesh for {found.type!r}"
        )


def check_no_hooks(name: str, parameter: torch.Tensor) -> None:
    """Raise when hooks would be lost with a parameter that is replaced."""
    if has_hooks(parameter):
        raise ValueError(
            f"fully_shard: parameter {name!r} has hooks (register_hook, register_post_accumulate_grad_hook), but gets "
            "replaced by a sharded one, on which they would not run. Register them after fully_shard, on the "
            "parameter that the module has then; they get the reduced gradient, a DTensor"
        )


def refuses_freed(module: nn.Module) -> AbstractContextManager[Any]:
    """A forward whose backward raises where it reads a parameter that was freed, and not gathered again."""

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        if saved.layout is torch.strided and saved.numel() and not saved.untyped_storage().size():
            raise RuntimeError(
                f"the backward of {type(module).__name__} reads its parameters, which set_unshard_in_backward(False) "
                "does not gather for it; leave that to modules whose backward needs none, such as an embedding"
            )
        return saved

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack)


def current_parameter(param: HSDPParam) -> nn.Parameter:
    """The parameter that took the place of a sharded one, if it can.

    Raises:
        RuntimeError: it is gone, or is not laid out as the sharded one was.
    """
    module, attribute = param.owners[0]
    found: Any = module._parameters.get(attribute)
    wanted = param.placement.sharded
    if isinstance(found, DTensor) and found.layout is wanted and tuple(found.shape) == param.shape:
        return found  # type: ignore[return-value]
    if found is None:
        what = "was removed"
    elif isinstance(found, DTensor):
        what = f"was replaced by a DTensor of shape {tuple(found.shape)} with {found.layout}"
    else:
        what = f"was replaced by a plain parameter of shape {tuple(found.shape)}"
    raise RuntimeError(
        f"parameter {param.name!r} {what} after fully_shard. Change the module before fully_shard, or write into the "
        f"parameter (load_state_dict, copy_ under no_grad); what takes its place must be a DTensor of shape "
        f"{param.shape} with {wanted}"
    )


def check_nothing_added(modules: Sequence[nn.Module], params: Iterable[HSDPParam], ignored: frozenset[int]) -> None:
    """Raise when a module has parameters that nobody manages."""
    places = {(id(owner), attribute) for p in params for owner, attribute in p.owners}
    for module in modules:
        for prefix, inner in module.named_modules():
            for attribute, parameter in inner._parameters.items():
                if parameter is None or id(parameter) in ignored or (id(inner), attribute) in places:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                raise RuntimeError(
                    f"parameter {name!r} was added to {type(module).__name__} after fully_shard, which does not manage "
                    "it: its gradient would differ between ranks. Add it before fully_shard, or name it in "
                    "ignored_params"
                )
