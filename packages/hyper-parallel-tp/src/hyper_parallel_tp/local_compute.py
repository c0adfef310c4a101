"""LocalCompute: run a module on this rank's pieces, for code whose operators have no rule (experts with kernels)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Partial, Placement, Replicate
from hyper_parallel.boundary import Boundary, forward_function, map_dtensors, set_forward
from hyper_parallel.distribute import replicate_rest
from hyper_parallel.placements import is_replicate
from hyper_parallel_tp.style import ParallelStyle

__all__ = ["LocalCompute"]


class LocalCompute(ParallelStyle):
    """Run a module on plain local tensors, its parameters included; its output is one term of a sum over the ranks.

    For a module that computes with pieces as it does with the whole: the experts of a mixture, say, of which every rank
    holds a slice of the hidden features. Inputs are made whole; gradients of inputs and of whole parameters are summed.

    Args:
        parameters: placements of the module's own parameters; the others are Replicate.
        output_layouts: what the sum becomes; default Replicate.
    """

    def __init__(
        self, *, parameters: Mapping[str, Placement] | None = None, output_layouts: Placement | None = None
    ) -> None:
        self.parameters = dict(parameters or {})
        self.output_layouts = output_layouts or Replicate()

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`."""
        self.place(module, device_mesh, self.parameters)
        replicate_rest(module, device_mesh, src_data_rank=self.src_data_rank, buffers=False)
        enter = Boundary([Replicate()], device_mesh)
        leave = Boundary([self.output_layouts], device_mesh, given=[Partial()])
        inner = forward_function(module)

        @functools.wraps(inner)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            def local(value: Any) -> Any:
                return map_dtensors(enter(value), _own_term)

            with _local_parameters(self):
                output = inner(self, *map(local, args), **{name: local(value) for name, value in kwargs.items()})
            return leave(output) if not isinstance(output, tuple) else type(output)(map(leave, output))

        set_forward(module, forward)
        return module


def _own_term(tensor: DTensor) -> Any:
    """The local tensor; where the tensor is whole, each rank sends back its own term of the gradient."""
    terms = [Partial() if is_replicate(p) else p for p in tensor.placements]
    return tensor.to_local(grad_placements=terms)


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """The module with the local tensors of its parameters in their place."""
    spread: list[tuple[nn.Module, str, Any]] = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    for owner, name, parameter in spread:
        owner._parameters[name] = _own_term(parameter)
    try:
        yield
    finally:
        for owner, name, parameter in spread:
            owner._parameters[name] = parameter
