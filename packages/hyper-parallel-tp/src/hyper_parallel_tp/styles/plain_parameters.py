"""A module whose parameters are DTensors, run with plain tensors in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hyper_parallel import DTensor

__all__ = ["Spread", "gives_terms", "note_no_terms", "plain_parameters", "spread_parameters"]

Spread = tuple[nn.Module, str, Any]
"""Owner, name and DTensor of a parameter."""


def spread_parameters(module: nn.Module) -> list[Spread]:
    """Every parameter of a module, or of those inside, that is a DTensor now."""
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if isinstance(parameter, DTensor)
    ]


@contextmanager
def plain_parameters(parameters: Sequence[Spread], local: Callable[[DTensor], torch.Tensor]) -> Iterator[None]:
    """The modules with ``local(parameter)`` in the place of each parameter."""
    for owner, name, parameter in parameters:
        owner._parameters[name] = local(parameter)  # type: ignore[assignment]
    try:
        yield
    finally:
        for owner, name, parameter in parameters:
            owner._parameters[name] = parameter


def note_no_terms(module: nn.Module) -> None:
    """Say that no rank has only a term of a gradient of a module's parameters: each has all of it, or there is none.

    It is left out where such terms are summed together, as room for it would be sent. Were it wrong, the gradient would
    be summed by itself.
    """
    for part in module.modules():
        part.__dict__["_no_terms"] = True


def gives_terms(owner: nn.Module) -> bool:
    """Whether gradients of a module's own parameters may have to be summed; see :func:`note_no_terms`."""
    return not owner.__dict__.get("_no_terms", False)
