"""Which results of a call are its inputs or share memory with them: on one device, and on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from hyper_parallel.tensor.dtensor import DTensor

Alias = Literal["is", "shares memory with", "is apart from"]


def aliases(outputs: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[list[Alias]]:
    """What each tensor output is to each input on one device; no entry for an output that is no tensor."""
    return [[_alias(o, x) for x in inputs] if isinstance(o, torch.Tensor) else [] for o in outputs]


def wrong_aliases(
    outputs: Sequence[Any], inputs: Sequence[DTensor], expected: Sequence[Sequence[Alias]]
) -> Iterator[str]:
    """Where results on a mesh are to their inputs something else than on one device.

    A redistributed copy in the place of a view is right: the engine carries writes to it on, or refuses them.
    """
    for number, (out, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if not isinstance(out, DTensor) or out._copied_by is not None:
            continue
        for index, (leaf, want) in enumerate(zip(inputs, wanted, strict=True)):
            got: Alias = "is" if out is leaf else _alias(out._resolve(), leaf._resolve())
            if out is not leaf and got == "is":
                got = "shares memory with"
            if got != want and out._local.numel() and leaf._local.numel():
                yield f"output {number} {got} input {index}, on one device it {want} it"


def _alias(output: torch.Tensor, source: torch.Tensor) -> Alias:
    if output is source:
        return "is"
    together = output.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return "shares memory with" if together else "is apart from"
