"""The short way of the layers that every model is made of, where a style has laid out all that they meet.

What a style says of such a layer decides what it does with plain pieces. A whole input times a weight split by output
features is the output split by its features; an input split by its features times a weight split by input features is
one term of a sum; a norm sees one position at a time. So nothing has to be looked up per call, and what the caller gets
need not be a DTensor before. All else (a LoRA layer, a subclass with a forward of its own, a parameter that is laid out
differently, a DTensor on a larger mesh) goes the general way: the layer's own forward on DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Layout
from hyper_parallel.rules import Boundary, forward_function, local_of, mesh_info, remembered, set_forward

__all__ = ["compute_on_pieces", "function_of_pieces"]

Compute = Callable[..., "torch.Tensor | None"]
"""From the layer, a piece of its input and its parameters, by name, as that needs them, to a piece of the output."""


def _linear(layer: nn.Linear, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor | None:
    return F.linear(x, weight, bias) if x.shape[-1] == weight.shape[1] else None


def _layer_norm(layer: nn.LayerNorm, x: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
    return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


def _rms_norm(layer: nn.RMSNorm, x: torch.Tensor, weight: Any = None) -> torch.Tensor:
    return F.rms_norm(x, layer.normalized_shape, weight, layer.eps)


_FUNCTIONS: Mapping[Any, Compute] = {
    nn.Linear.forward: _linear,
    nn.LayerNorm.forward: _layer_norm,
    nn.RMSNorm.forward: _rms_norm,
}


def function_of_pieces(module: nn.Module) -> Compute | None:
    """What a module does with pieces; None when it has a forward or parameters of its own."""
    is_known = "forward" not in vars(module) and module._parameters.keys() <= {"weight", "bias"}
    return _FUNCTIONS.get(type(module).forward) if is_known else None


def compute_on_pieces(
    layer: nn.Module,
    compute: Compute,
    mesh: DeviceMesh,
    enter: Boundary,
    leave: Callable[[Any, torch.Tensor, Any], Any],
    uses: Mapping[str, tuple[Layout, frozenset[int]]],
) -> None:
    """Let a layer whose forward does all that its style says take the short way where it can.

    Args:
        layer: with its parameters spread.
        compute: its function of pieces; None as result is the wish to go the general way, which knows what is wrong.
        mesh: the style's.
        enter: the boundary at its input.
        leave: from the layer, a piece of the output, and the input as it entered (None for a plain piece that was the
            right one already), to what the style returns.
        uses: typed layouts in which parameters meet the piece, where those are not their own.
    """
    general = forward_function(layer)
    info = mesh_info(mesh)
    parameters: Mapping[str, Any] = layer._parameters
    placed = {name: parameter.layout for name, parameter in parameters.items() if parameter is not None}

    @functools.wraps(general)
    def forward(layer: nn.Module, input: torch.Tensor) -> Any:
        local: dict[str, torch.Tensor] = {}
        parameter: Any
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            if parameter.__class__ is not DTensor or parameter.spec.layout is not placed.get(name):
                return general(layer, input)
            if name in uses:
                parameter = remembered(parameter, *uses[name])
            local[name] = local_of(parameter)
        if len(local) != len(placed):  # one is computed from others now, as weight_norm does
            return general(layer, input)
        entered, piece = None, input
        if not enter.is_in_place(input):
            entered = enter(input)
            if entered.__class__ is not DTensor or entered.spec.layout.info is not info:
                return general(layer, input)
            piece = local_of(entered)
        out = compute(layer, piece, **local)
        return general(layer, input) if out is None else leave(layer, out, entered)

    set_forward(layer, forward)
