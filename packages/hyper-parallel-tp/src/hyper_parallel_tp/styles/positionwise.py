"""PositionwiseParallel: modules that look at one position of a sequence at a time, on this rank's plain piece."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Placement, Replicate
from hyper_parallel.rules import (
    Boundary,
    Spec,
    contiguous_stride,
    fit_rank,
    forward_function,
    is_partial,
    is_replicate,
    is_shard,
    join_gradients,
    local_of,
    local_shape,
    make_spec,
    map_structure,
    remembered,
    replicate_plain_inside,
    set_forward,
    wrap,
)
from hyper_parallel_tp.styles.plain_parameters import note_no_terms, plain_parameters, spread_parameters
from hyper_parallel_tp.styles.style import ParallelStyle, checked_placement

__all__ = ["PositionwiseParallel"]


class PositionwiseParallel(ParallelStyle):
    """Run a module that looks at one position at a time (a norm, a mixing of residual streams) on plain local tensors.

    Every rank computes with the positions that it has, and with whole parameters, whose gradients are summed, together,
    where ranks have different positions. The module is called with one tensor, ``[batch, sequence, ...]``, and what it
    returns is laid out like that: the first dims of an output are batch and sequence too. All of its operators run as
    they do on one device, without rules.

    Args:
        layout: what the input is, and so the outputs; default Replicate, ``Shard(1)`` for sequence parallel.
    """

    def __init__(self, *, layout: Placement | None = None) -> None:
        self.layout = checked_placement("layout", layout) or Replicate()

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`."""
        self.replicate(module, device_mesh)
        if is_replicate(self.layout):
            note_no_terms(module)
        inner = forward_function(module)
        replicate_plain_inside(module)
        general = forward_function(module)
        enter = Boundary([self.layout], device_mesh, in_flight=True)

        @functools.wraps(inner)
        def forward(self: nn.Module, input: torch.Tensor) -> Any:
            hidden: DTensor = enter(input)
            parted = _parted(hidden.spec)
            parameters = spread_parameters(self)
            if parted is None or not all(_is_whole(p, parted) for _, _, p in parameters):
                return general(self, hidden)

            def local(parameter: DTensor) -> torch.Tensor:
                names, spec = parameter.layout.info.names, parameter.spec
                axes = frozenset(axis for axis, name in enumerate(names) if name in parted)
                return local_of(remembered(parameter, spec.layout, spec.varying | axes))

            for axis in sorted(parted):
                join_gradients([parameter for _, _, parameter in parameters], axis)
            with plain_parameters(parameters, local):
                output = inner(self, local_of(hidden))
            return map_structure(output, lambda piece: _like(piece, hidden.spec))

        set_forward(module, forward)
        return module


@functools.lru_cache(maxsize=256)
def _parted(spec: Spec) -> frozenset[str] | None:
    """Names of the mesh axes on which ranks compute different things.

    None where the rules have to: another dim is sharded, a sum is pending, or some rank has no position at all, which
    not every module's code can do with. All ranks find the same.
    """
    layout = spec.layout
    least = local_shape(layout, tuple(spec.shape), tuple(size - 1 for size in layout.mesh_shape))
    if any(layout.shard_order[2:]) or any(is_partial(p) for p in layout.placements) or 0 in least:
        return None
    axes = zip(layout.info.names, layout.placements, strict=True)
    return frozenset(name for axis, (name, p) in enumerate(axes) if is_shard(p) or axis in spec.varying)


def _is_whole(parameter: DTensor, parted: frozenset[str]) -> bool:
    """Whether every rank holds a parameter whole, and its gradients can be summed over the axes."""
    return parted <= {*parameter.layout.info.names} and all(is_replicate(p) for p in parameter.placements)


def _like(piece: torch.Tensor, spec: Spec) -> DTensor:
    return wrap(piece.contiguous(), _spec_like(spec, piece.shape, piece.dtype))


@functools.lru_cache(maxsize=256)
def _spec_like(spec: Spec, shape: torch.Size, dtype: torch.dtype) -> Spec:
    layout = fit_rank(spec.layout, len(shape))
    whole = (*spec.shape[:2], *shape[2:])
    return make_spec(layout, whole, contiguous_stride(whole), dtype, spec.varying)
