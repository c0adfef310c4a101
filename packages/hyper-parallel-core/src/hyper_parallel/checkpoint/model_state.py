"""State dicts of modules whose parameters are DTensors: PyTorch's functions of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from hyper_parallel.checkpoint.whole_tensors import announced, delivered, placed

__all__ = ["get_model_state_dict", "set_model_state_dict"]


def get_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """The parameters and persistent buffers of a module by name; as
    ``torch.distributed.checkpoint.state_dict.get_model_state_dict``.

    Args:
        model: any module; what is sharded in it is a DTensor.
        options: PyTorch's. By default the tensors of the module itself, sharded as they are: for ``save``, ``load``.
            ``full_state_dict``: whole tensors, on every rank. ``full_state_dict, cpu_offload``: whole tensors in rank
            0's host memory, one gathered at a time, and ``{}`` on the others. ``ignore_frozen_params``: without the
            parameters that need no gradient.
    """
    options = checked(options)
    state = {canonical(name): value for name, value in model.state_dict().items()}
    if options.ignore_frozen_params:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                state.pop(canonical(name), None)
    # A tied tensor has to be made whole only once.
    twice = second_names(model, state) if options.full_state_dict else {}
    ready = delivered({name: value for name, value in state.items() if name not in twice}, options)
    return {name: ready[twice.get(name, name)] for name in state} if ready else {}


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a state dict into a module; as ``torch.distributed.checkpoint.state_dict.set_model_state_dict``.

    Args:
        model: the module. Parameters on the meta device are replaced, all others written in place.
        model_state_dict: by name. DTensors in any layout of the module's mesh; with ``full_state_dict`` whole tensors,
            of which each rank keeps its part; with ``broadcast_from_rank0`` too, only rank 0's counts.
        options: PyTorch's; ``strict=False`` allows missing and unexpected names.

    Returns:
        Missing and unexpected names, as ``Module.load_state_dict``.

    Raises:
        RuntimeError: names are missing or unexpected (``strict``), or shapes differ.
        TypeError: a whole tensor for a sharded one without ``full_state_dict``.
    """
    options = checked(options)
    if options.broadcast_from_rank0:
        model_state_dict = announced(model_state_dict)
    own = model.state_dict()
    raw = {canonical(name): name for name in own}
    ready = {}
    with torch.no_grad():
        for name, value in model_state_dict.items():
            target = own.get(raw.get(name, name))
            value = placed(value, target, name, options)
            if options.full_state_dict and isinstance(target, torch.Tensor) and _fits(value, target):
                target.copy_(value)  # at once, so that there is never a second copy of all shards
                value = target
            ready[raw.get(name, name)] = value
    frozen = _frozen(model) if options.ignore_frozen_params else set()
    for name in frozen - ready.keys():
        ready[name] = own[name]
    on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in own.values())
    tied = ties(model) if on_meta else []
    result = model.load_state_dict(ready, strict=options.strict, assign=on_meta)
    for first, *others in tied:  # each name was given a tensor of its own
        for name in others:
            owner, _, leaf = raw.get(name, name).rpartition(".")
            setattr(model.get_submodule(owner), leaf, _attribute(model, raw.get(first, first)))
    return result


def canonical(name: str) -> str:
    """A parameter's name without what ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


def ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter or buffer that has several, in the module's order."""
    names: dict[int, list[str]] = {}
    for found in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in found:
            names.setdefault(id(tensor), []).append(canonical(name))
    return [group for group in names.values() if len(group) > 1]


def second_names(model: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """The names in a state dict whose tensor is there under an earlier name too, with that name."""
    groups = ([name for name in group if name in state] for group in ties(model))
    return {name: group[0] for group in groups for name in group[1:]}


def _attribute(model: nn.Module, path: str) -> Any:
    owner, _, leaf = path.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def checked(options: StateDictOptions | None) -> StateDictOptions:
    """The options, or the default ones.

    Raises:
        ValueError: ``broadcast_from_rank0`` without ``full_state_dict``.
    """
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("broadcast_from_rank0=True needs full_state_dict=True: rank 0 has whole tensors")
    return options


def _fits(value: Any, target: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and not target.is_meta and target.shape == value.shape


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
