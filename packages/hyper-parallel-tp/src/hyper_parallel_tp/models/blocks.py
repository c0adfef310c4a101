"""The repeated parts of a model, each gathered, checkpointed and compiled by itself."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["blocks_of", "inside_adapters"]


def inside_adapters(model: nn.Module) -> nn.Module:
    """The model that ``peft`` wrapped, whose names a plan has; otherwise the model itself."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name: the layers that a ``transformers`` model says must not be split; of another
    module the members of its outermost lists of modules."""
    kinds: set[str] = set()
    for module in model.modules():
        kinds |= set(getattr(module, "_no_split_modules", None) or ())
    named = dict(model.named_modules())
    found = [name for name, module in named.items() if type(module).__name__ in kinds and name]
    if not found:
        found = [
            f"{name}.{child}".lstrip(".")
            for name, module in named.items()
            if isinstance(module, nn.ModuleList)
            for child, _ in module.named_children()
        ]
    outermost: list[str] = []
    for name in found:  # parents come before what is inside of them
        if not any(name.startswith(f"{other}.") for other in outermost):
            outermost.append(name)
    return {name: named[name] for name in outermost if next(named[name].parameters(), None) is not None}
