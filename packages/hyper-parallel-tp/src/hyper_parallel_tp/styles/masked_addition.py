"""MaskedAddition: values added to some positions of a sequence, without indexing with a mask."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["MaskedAddition"]


class MaskedAddition(ParallelStyle):
    """Let a method that adds values to the positions that a mask picks work on a sharded sequence as it is.

    Such a method is called with hidden states ``[batch, sequence, features]``, a mask ``[batch, sequence]`` and values
    ``[positions that it picks, features]``, in their order, and returns the hidden states with the values added to
    these positions. Reading and writing them by the mask makes tensors of a length that only the data tells, which are
    sent around; here each rank takes, of values that are whole, those of its own positions, and only the gradient of
    the values is summed.

    Args:
        method: its name, after that of the submodule that has it if that is not the module itself:
            ``"language_model._deepstack_process"``.
    """

    def __init__(self, method: str) -> None:
        self.method = method

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`.

        Raises:
            ValueError: there is no such method.
        """
        owner_name, _, name = self.method.rpartition(".")
        owner: Any = module.get_submodule(owner_name)
        if not callable(getattr(owner, name, None)):
            raise ValueError(f"MaskedAddition({self.method!r}): {type(owner).__name__} has no method {name!r}")
        setattr(owner, name, types.MethodType(_added, owner))
        return module


def _added(module: nn.Module, hidden: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    values = values.to(hidden.device, hidden.dtype)
    at = mask.to(hidden.device).unsqueeze(-1).expand_as(hidden)
    return hidden + torch.zeros_like(hidden).masked_scatter(at, values)
