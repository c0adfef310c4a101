"""SequenceParallel and NoParallel: modules whose parameters every rank holds whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Placement, Replicate, Shard
from hyper_parallel.rules import (
    Boundary,
    Spec,
    contiguous_stride,
    make_spec,
    map_dtensors,
    replicate_plain_inside,
    wrap,
)
from hyper_parallel_tp.styles.call_changes import change_inputs, change_output, parameter_names
from hyper_parallel_tp.styles.local_layers import Compute, compute_on_pieces, function_of_pieces
from hyper_parallel_tp.styles.local_outputs import GradPlacements, check_pieces, local_piece
from hyper_parallel_tp.styles.style import ParallelStyle, checked_placement

__all__ = ["NoParallel", "SequenceParallel"]


class SequenceParallel(ParallelStyle):
    """Run a norm or a dropout on a tensor that is sharded along its sequence; parameters are Replicate.

    The gradients of the parameters are summed over the ranks, as each sees its part of the sequence. Unlike PyTorch's
    style, which trusts that all ranks were initialised alike, the parameters come from ``src_data_rank``.

    Args:
        sequence_dim: dim of the first input that is sharded; a plain input is this rank's part.
        use_local_output: return this rank's part as a plain tensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`."""
        self.replicate(module, device_mesh)
        compute = function_of_pieces(module) if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) else None
        replicate_plain_inside(module)
        enter = Boundary([Shard(self.sequence_dim)], device_mesh, in_flight=True)
        change_inputs(module, [lambda module, value: enter(value)])
        if self.use_local_output:
            change_output(
                module, lambda module, output: map_dtensors(output, lambda t: local_piece(t, module, device_mesh))
            )
        if compute is not None:
            # Each rank sees its part of the positions, so its gradient of a parameter is one term.
            parameters: Iterable[tuple[str, Any]] = module.named_parameters(recurse=False)
            uses = {name: (parameter.layout, frozenset([0])) for name, parameter in parameters}
            compute_on_pieces(module, self._by_position(compute), device_mesh, enter, self._leaving(enter), uses)
        return module

    def _by_position(self, compute: Compute) -> Compute:
        """The function of pieces of a norm; None as result where it is over the sequence as well."""

        def norm(layer: Any, piece: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor | None:
            positions = piece.ndim - len(layer.normalized_shape)
            return compute(layer, piece, **parameters) if self.sequence_dim % piece.ndim < positions else None

        return norm

    def _leaving(self, enter: Boundary) -> Callable[..., torch.Tensor]:
        """From a piece of a norm's output to what the style returns."""

        def leave(layer: nn.Module, out: torch.Tensor, entered: DTensor | None) -> torch.Tensor:
            if entered is None:
                return out if self.use_local_output else enter(out)
            spec = _like(entered.spec, out.dtype)
            if self.use_local_output:
                check_pieces(spec.layout, spec.shape, layer)
                return out
            return wrap(out.contiguous(), spec)

        return leave


@lru_cache(maxsize=256)
def _like(spec: Spec, dtype: torch.dtype) -> Spec:
    return make_spec(spec.layout, spec.shape, contiguous_stride(spec.shape), dtype)


class NoParallel(ParallelStyle):
    """Run a module (a norm, a router, a whole model around styled parts) with everything that is not spread yet held
    whole on every rank.

    Its parameters, and those of its children that no other style spread, become Replicate: what they compute joins
    the layouts of the parts around, and gradients are right whatever meets them.

    Args:
        input_layout: what a plain first input is; DTensors, everywhere, stay as they are. Default Replicate.
        output_layout: what every output becomes; default Replicate.
        use_local_output: return plain tensors.
        local_output_grad_placements: of the gradient of a plain output, one per mesh axis, as ``grad_placements`` of
            :meth:`DTensor.to_local`. Say ``[Partial()]`` where an output that is equal on all ranks is used together
            with plain shards, so that each rank has one term of its gradient; by default an error, in the first
            backward, says so.
    """

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
        local_output_grad_placements: GradPlacements = None,
    ) -> None:
        self.local_output_grad_placements = local_output_grad_placements
        self.input_layout = checked_placement("input_layout", input_layout) or Replicate()
        self.output_layout = checked_placement("output_layout", output_layout) or Replicate()
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`."""
        self.replicate(module, device_mesh)
        replicate_plain_inside(module)
        enter = Boundary([self.input_layout], device_mesh)
        leave = Boundary([self.output_layout], device_mesh)

        def take_plain(module: nn.Module, value: Any) -> Any:
            return value if isinstance(value, DTensor) else enter(value)

        def hand_out(module: nn.Module, output: Any) -> Any:
            def move(value: DTensor) -> Any:
                value = leave(value)
                if not self.use_local_output:
                    return value
                return local_piece(value, module, device_mesh, self.local_output_grad_placements)

            return map_dtensors(output, move)

        first = parameter_names(module)[0][:1]
        change_inputs(module, [], dict.fromkeys(first, take_plain))  # a model may be called without it
        change_output(module, hand_out)
        return module
