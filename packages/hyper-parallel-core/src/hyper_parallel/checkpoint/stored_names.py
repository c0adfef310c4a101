"""Under which names, and in what pieces, ``transformers`` stores the tensors of its models.

Some of its modules hold as one parameter what the files hold as many: the experts of a layer as one ``gate_up_proj``,
the files each expert's ``gate_proj.weight`` and ``up_proj.weight``. How its ``from_pretrained`` puts such a parameter
together, and its ``save_pretrained`` takes it apart, is found by letting it do so with deferred tensors: of what comes
out any block can be made.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyper_parallel.checkpoint.deferred.tensor import DeferredTensor

__all__ = ["FromFiles", "for_files", "from_files"]


@dataclass
class FromFiles:
    """What files have for a module.

    Attributes:
        values: by the module's names.
        unexpected: names in the files that mean nothing in the module.
        failed: names in the module that could not be made from what the files have, with the reason.
        may_lack: whether the files need not have a tensor of this name.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    may_lack: re.Pattern[str] | None = None


def from_files(model: nn.Module, names: Iterable[str], stored: Mapping[str, DeferredTensor]) -> FromFiles:
    """The tensors of files under the names of a module, put together as it holds them.

    Args:
        model: the module.
        names: of the tensors in its state dict.
        stored: the tensors of the files.
    """
    names = list(names)
    loading = _core_model_loading(model)
    if loading is None:
        there = set(names)
        return FromFiles({n: stored[n] for n in names if n in stored}, [n for n in stored if n not in there])
    owner = _as_built(model)
    found = FromFiles(may_lack=_any_of(getattr(owner, "_keys_to_ignore_on_load_missing", None)))
    waiting = _Conversions(loading, owner, names)
    unmatched = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        renamed = waiting.add(name, stored[name])
        if renamed is not None:
            unmatched[name] = renamed
    ignored = _any_of(
        [*(getattr(owner, "_keys_to_ignore_on_load_unexpected", None) or ()), *_moved_buffers(names, model)]
    )
    found.unexpected = [name for name, new in unmatched.items() if ignored is None or not ignored.search(new)]
    waiting.convert(found)
    vars(model)["_weight_conversions"] = waiting.used()
    return found


def for_files(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Deferred tensors of a module's state dict under the names, and taken apart, as files store them."""
    loading = _core_model_loading(model)
    stored = dict(state) if loading is None else loading.revert_weight_conversion(_as_built(model), dict(state))
    return {name: tensor.contiguous() for name, tensor in stored.items()}


class _Conversions:
    """What ``transformers`` does to the tensors of files on their way into a model, tensor by tensor.

    Follows ``transformers.core_model_loading.convert_and_load_state_dict_in_model``, which sets the parameters of the
    model itself.
    """

    def __init__(self, loading: Any, model: Any, names: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._loading, self._model = loading, model
        self._names = dict.fromkeys(names, True)
        self._mapping = get_model_conversion_mapping(model)
        self._renamings = [m for m in self._mapping if isinstance(m, loading.WeightRenaming)]
        self._converters = [m for m in self._mapping if isinstance(m, loading.WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> str | None:
        """Take a tensor of the files; what it would be called in the model when the model has nothing of that name."""
        prefix = self._model.base_model_prefix
        rename = self._loading.rename_source_key
        new, pattern = rename(name, self._renamings, self._converters, prefix, self._names)
        if new not in self._names and name in self._names:
            new, pattern = rename(name, [], [], prefix, self._names)
        if new not in self._names:
            return str(new)
        if pattern is not None:
            mapping = self._waiting.setdefault(new, copy.deepcopy(self._by_pattern[pattern]))
        else:
            mapping = self._waiting.setdefault(new, self._loading.WeightRenaming(name, new))
            pattern = name
        mapping.add_tensor(new, name, pattern, tensor)
        return None

    def convert(self, found: FromFiles) -> None:
        """Put together what was taken."""
        for name, mapping in self._waiting.items():
            sources = sorted(source for names in mapping.layer_targets.values() for source in names)
            try:
                made = mapping.convert(name, model=self._model, config=self._model.config)
            except Exception as error:  # whatever an operation of transformers raises for what it does not expect
                found.failed[name] = f"{type(error).__name__}: {error} (from {', '.join(sources[:4])})"
                continue
            for target, value in made.items():
                value = value[0] if isinstance(value, list) else value
                found.values[target] = value.detach()

    def used(self) -> list[Any]:
        """What matched a name, which ``save_pretrained`` undoes."""
        return [mapping for mapping in self._mapping if mapping.was_used()]


def _as_built(model: nn.Module) -> Any:
    """The model with the classes from before ``fully_shard``, by whose names ``transformers`` knows what to do."""
    modules = dict(model.named_modules())
    if all(_class_as_built(module) is type(module) for module in modules.values()):
        return model
    before = {name: _with_class(module, _class_as_built(module)) for name, module in modules.items()}
    root = before[""]
    vars(root)["named_modules"] = before.items
    return root


def _class_as_built(module: nn.Module) -> type[nn.Module]:
    name = type(module).__name__
    return next((c for c in type(module).__mro__ if name == f"FSDP{c.__name__}"), type(module))


def _with_class(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The same parts in an object of another class."""
    other = object.__new__(kind)
    vars(other).update(vars(module))
    return other


def _moved_buffers(names: Iterable[str], model: nn.Module) -> Iterable[str]:
    """Patterns of buffers that older files have and newer models compute, as ``from_pretrained`` passes over them."""
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        yield r"rotary_emb\.inv_freq"
    if any(name.endswith("position_ids") for name in buffers):
        yield r"(^|\.)position_ids$"


def _any_of(patterns: Iterable[str] | None) -> re.Pattern[str] | None:
    alternatives = "|".join(f"({pattern})" for pattern in sorted(patterns or ()))
    return re.compile(alternatives) if alternatives else None


def _core_model_loading(model: nn.Module) -> Any:
    """The module of ``transformers`` that converts weights; None for a model that is not its."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    try:
        from transformers import core_model_loading
    except ImportError:  # before version 5, names were the module's
        return None
    return core_model_loading
