"""The gradients of what a block holds whole (norms, biases, routers) are summed over tp together, once per block."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from hyper_parallel import DTensor
from hyper_parallel.rules import forward_function, is_replicate, join_gradients, set_forward
from hyper_parallel_tp.styles.plain_parameters import gives_terms

__all__ = ["join_gradients_of_blocks"]

_PLACES = "_places_of_joined_gradients"


def join_gradients_of_blocks(blocks: Iterable[nn.Module], axis: str = "tp") -> None:
    """Let each block sum the gradients of its parameters that are Replicate over a mesh axis in one all-reduce."""
    for block in blocks:
        places = [
            (owner, name)
            for owner in filter(gives_terms, block.modules())
            for name, parameter in owner._parameters.items()
            if _is_whole(parameter, axis)
        ]
        if len(places) > 1:
            _join(block, places, axis)


def _is_whole(parameter: Any, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.layout.info.names
    return axis in names and is_replicate(parameter.placements[names.index(axis)])


def _join(block: nn.Module, places: list[tuple[nn.Module, str]], axis: str) -> None:
    inner = forward_function(block)
    block.__dict__[_PLACES] = places  # and not in the closure: a copy of the block has those of the copy

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not those of before: fully_shard puts others in their place for a call, and so do adapters.
        held: Iterable[Any] = (owner._parameters.get(name) for owner, name in self.__dict__[_PLACES])
        join_gradients([parameter for parameter in held if isinstance(parameter, DTensor)], axis)
        return inner(self, *args, **kwargs)

    set_forward(block, forward)
