"""Which parameters a ``fully_shard`` call manages, and where they are held; tied ones are held in several places."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hyper_parallel_fsdp.parameter import HSDPParam, Owner
from hyper_parallel_fsdp.state import FullyShardState, state_of

_managed: Any = WeakIdKeyDictionary()  # sharded parameters, and those from before -> what manages them


def note_managed(old: nn.Parameter, param: HSDPParam) -> None:
    """Remember what manages a parameter; modules elsewhere that are tied to it may hold the one from before."""
    _managed[old] = _managed[param.sharded] = weakref.ref(param)


def managed_as(parameter: nn.Parameter) -> HSDPParam | None:
    """What manages a parameter, which may be the one from before it was sharded."""
    found = _managed.get(parameter)
    return None if found is None else found()


@dataclass
class Found:
    """A parameter and every place in the visited modules that holds it."""

    name: str
    parameter: nn.Parameter
    owners: list[Owner] = field(default_factory=list)


def parameters_of(modules: Sequence[nn.Module], ignored: frozenset[int]) -> list[Found]:
    """The parameters of these modules, those of wrapped modules inside left out."""
    found: dict[int, Found] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        if id(module) in seen or state_of(module) is not None:
            return
        seen.add(id(module))
        for attribute, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in ignored:
                each = found.setdefault(id(parameter), Found(prefix + attribute, parameter))
                each.owners.append((module, attribute))
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    for module in modules:
        visit(module, "")
    return list(found.values())


def holder_of_tied(found: Found, modules: Sequence[nn.Module]) -> FullyShardState | None:
    """The state of the wrapped module inside that manages a tied parameter, which moves up to the common parent.

    Raises:
        ValueError: it is managed elsewhere, where it would not be whole while these modules compute.
    """
    param = managed_as(found.parameter)
    if param is None:
        return None
    inside = {id(m) for module in modules for m in module.modules()}
    if all(id(module) in inside for module, _ in param.owners):
        for state in (state_of(m) for module in modules for m in module.modules()):
            if state is not None and param in state.params:
                return state
    raise ValueError(
        f"fully_shard: parameter {found.name!r} is tied to {param.name!r} of another wrapped module. Wrap both modules "
        "in one call, fully_shard([first, second]), or neither of them and leave the parameter to their common parent"
    )


def first_name(owners: Sequence[Owner], modules: Sequence[nn.Module]) -> str:
    """The name under which a tied parameter is met first in these modules."""
    held = {(id(module), attribute) for module, attribute in owners}
    for module in modules:
        for name, inner in module.named_modules():
            for attribute in inner._parameters:
                if (id(inner), attribute) in held:
                    return f"{name}.{attribute}" if name else attribute
    raise AssertionError("a module was looked for that is not there")
