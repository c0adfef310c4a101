"""Parameters that sharding replaced: an optimizer that still holds them would train nothing, so its step is refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

__all__ = ["note_replaced", "replaces_parameters"]


@dataclass
class _Replaced:
    """What became of a parameter.

    Attributes:
        name: what it is called, and in which module.
        call: what replaced it last.
        current: the parameter that the model has now.
    """

    name: str
    call: str
    current: TensorWeakRef


_replaced: Any = WeakIdKeyDictionary()  # parameter, the old ones and the current one -> _Replaced
_notes = 0
_in_order: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


@contextmanager
def replaces_parameters(modules: Sequence[nn.Module], call: str) -> Iterator[None]:
    """A block that replaces parameters of these modules; ``call`` is the function to name to the user."""
    places = [
        (owner, attribute, f"{prefix}.{attribute}".lstrip("."), type(module).__name__, TensorWeakRef(parameter))
        for module in modules
        for prefix, owner in module.named_modules()
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    ]
    yield
    for owner, attribute, name, module_name, before in places:
        old, new = before(), owner._parameters.get(attribute)
        if old is not None and new is not None and old is not new:  # one that is gone is held by no optimizer
            note_replaced(old, new, f"{name!r} of {module_name}", call)


def note_replaced(old: torch.Tensor, new: torch.Tensor, name: str, call: str) -> None:
    """Remember that ``call`` put a new parameter in the place of an old one."""
    global _notes
    if not _notes:
        register_optimizer_step_pre_hook(_check_optimizer)
    _notes += 1
    known = _replaced.get(old)
    if known is None:
        known = _replaced[old] = _Replaced(name, call, TensorWeakRef(new))
    else:
        known.name, known.call, known.current = name, call, TensorWeakRef(new)
    _replaced[new] = known


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step: raise when it would update a parameter that was replaced, whose gradient the new one got.

    An old parameter that has a gradient is still in use somewhere, and may be trained.
    """
    state = (_notes, sum(len(group["params"]) for group in optimizer.param_groups))
    if _in_order.get(optimizer) == state:
        return
    in_order = True
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = _replaced.get(parameter)
            current = None if found is None else found.current()
            if current is None or current is parameter:
                continue
            in_order = False
            if parameter.grad is None and current.grad is not None:
                kind = type(optimizer).__name__
                raise RuntimeError(
                    f"{kind}.step(): parameter {found.name} was replaced by {found.call}, and this optimizer holds the "
                    f"one from before, so its step would change nothing in the model. Build the {kind} after "
                    f"{found.call}, from the parameters that the model has then"
                )
    if in_order:
        _in_order[optimizer] = state
