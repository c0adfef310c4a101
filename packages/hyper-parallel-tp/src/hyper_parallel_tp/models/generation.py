"""``generate()`` of a parallelised model: it takes plain token ids and gets plain logits."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Replicate
from hyper_parallel.rules import forward_function, map_structure, set_forward, tensors_of
from hyper_parallel_tp.models.shard_batch import data_mesh
from hyper_parallel_tp.parallel_dims import ParallelDims

__all__ = ["adapt_generate"]

_STATE = "_generation_of_a_parallel_model"


class _Generation:
    """What a model knows of its calls.

    Attributes:
        depth: how many calls of ``generate()`` run.
        laid_out: whether the last call outside of them was with DTensors: the parameters are for such batches then.
    """

    def __init__(self) -> None:
        self.depth, self.laid_out = 0, False


def adapt_generate(model: nn.Module, dims: ParallelDims) -> None:
    """Let ``generate()`` of a ``transformers`` model work as on one device: all ranks call it with the same token ids.

    It asks the model for the logits of the last position only, so that is all that is gathered. Called after
    ``fully_shard``, as token ids have to come as the batches of training did before that looks at them.
    """
    generate: Any = getattr(model, "generate", None)
    if not isinstance(generate, types.MethodType):
        return
    function, inner, mesh = generate.__func__, forward_function(model), data_mesh(dims)
    model.__dict__[_STATE] = _Generation()

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = inner(self, *args, **kwargs)
        if self.__dict__[_STATE].depth and isinstance(getattr(output, "logits", None), DTensor):
            output.logits = output.logits.full_tensor()
        return output

    @functools.wraps(function)
    def generating(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__[_STATE]
        state.depth += 1
        try:
            return function(self, *args, **kwargs)
        finally:
            state.depth -= 1

    set_forward(model, forward)
    model.__dict__["generate"] = types.MethodType(generating, model)
    if mesh is not None:
        model.register_forward_pre_hook(functools.partial(_as_in_training, mesh), with_kwargs=True, prepend=True)


def _as_in_training(mesh: DeviceMesh, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Plain token ids as DTensors that every rank has whole, where the model is used to DTensors."""
    state = model.__dict__[_STATE]
    if not state.depth:
        state.laid_out = any(isinstance(tensor, DTensor) for tensor in tensors_of((args, kwargs)))
        return None
    if not state.laid_out:
        return None

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
            return value
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim)

    given = {name: whole(value) for name, value in kwargs.items()}
    return map_structure(args, whole), given
