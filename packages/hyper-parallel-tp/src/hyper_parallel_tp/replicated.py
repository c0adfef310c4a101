"""SequenceParallel and NoParallel: modules whose parameters every rank holds whole."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Placement, Replicate, Shard
from hyper_parallel.boundary import Boundary, map_dtensors, replicate_plain_inside
from hyper_parallel.distribute import replicate_rest
from hyper_parallel_tp.call_hooks import change_inputs, parameter_names
from hyper_parallel_tp.local_outputs import local_piece
from hyper_parallel_tp.style import ParallelStyle

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
        replicate_rest(module, device_mesh, src_data_rank=self.src_data_rank, buffers=False)
        replicate_plain_inside(module)
        enter = Boundary([Shard(self.sequence_dim)], device_mesh, in_flight=True)
        change_inputs(module, [lambda module, value: enter(value)])
        if self.use_local_output:
            module.register_forward_hook(
                lambda module, args, output: map_dtensors(output, lambda t: local_piece(t, module, device_mesh))
            )
        return module


class NoParallel(ParallelStyle):
    """Run a module (a norm, a router, a whole model around styled parts) with everything that is not spread yet held
    whole on every rank.

    Its parameters, and those of its children that no other style spread, become Replicate: what they compute joins
    the layouts of the parts around, and gradients are right whatever meets them.

    Args:
        input_layout: what a plain first input is; DTensors, everywhere, stay as they are. Default Replicate.
        output_layout: what every output becomes; default Replicate.
        use_local_output: return plain tensors.
    """

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layout = input_layout or Replicate()
        self.output_layout = output_layout or Replicate()
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`."""
        replicate_rest(module, device_mesh, src_data_rank=self.src_data_rank, buffers=False)
        replicate_plain_inside(module)
        enter = Boundary([self.input_layout], device_mesh)
        leave = Boundary([self.output_layout], device_mesh)

        def take_plain(module: nn.Module, value: Any) -> Any:
            return value if isinstance(value, DTensor) else enter(value)

        def change_output(module: nn.Module, args: Any, output: Any) -> Any:
            def move(value: DTensor) -> Any:
                value = leave(value)
                return local_piece(value, module, device_mesh) if self.use_local_output else value

            return map_dtensors(output, move)

        first = parameter_names(module)[0][:1]
        change_inputs(module, [], dict.fromkeys(first, take_plain))  # a model may be called without it
        module.register_forward_hook(change_output)
        return module
