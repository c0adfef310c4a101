"""LocalCompute: run a module on plain local tensors: experts by features, linear attention by heads, any kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Layout, Partial, Placement, Replicate
from hyper_parallel.rules import (
    Boundary,
    MeshInfo,
    fit_rank,
    forward_function,
    is_partial,
    is_replicate,
    is_shard,
    join_gradients,
    local_of,
    map_dtensors,
    map_structure,
    mesh_info,
    remembered,
    set_forward,
    taken_as,
    tensors_of,
    varying_axes,
)
from hyper_parallel_tp.styles.call_changes import parameter_names
from hyper_parallel_tp.styles.colwise_rowwise import base_layer
from hyper_parallel_tp.styles.plain_parameters import gives_terms, plain_parameters, spread_parameters
from hyper_parallel_tp.styles.style import ParallelStyle, checked_placement

__all__ = ["LocalCompute"]


class LocalCompute(ParallelStyle):
    """Run a module on plain local tensors, its parameters included; its output is one term of a sum over the ranks.

    For a module that computes with shards as it does with the whole: experts of which every rank holds a slice of the
    hidden features, a linear attention of which it holds some heads. Any function and kernel can be in it, and nothing
    is dispatched. Inputs are gathered; gradients of inputs and of replicated parameters are summed, those of the
    parameters in one all-reduce.

    What it returns is such a term, every tensor in a structure. Of a tuple that is the first entry; the others are
    returned as they are, so attention weights are plain tensors of this rank's heads. A cache holds this rank's heads.

    A batch that is laid out over other axes of a larger mesh stays so: each rank computes with its part, and the output
    is laid out over those axes as the first input that is sharded over them.

    Args:
        parameters: placements of parameters by name, of the module itself or of what is in it
            (``"in_proj.weight": Shard(0)``, also of a LoRA layer around that projection); the others are Replicate.
            ``Partial()`` for what is added to the sum that the output is a term of, such as the bias of a projection
            back to the hidden features: every rank holds it, and it is added once.
        divided: names of whole numbers, attributes of the module, that count what is sharded (heads, features of all
            heads): while the module runs they are this rank's share.
        input_layouts: what a plain first input is; default Replicate. ``Shard(1)`` for sequence parallel: it is
            gathered, and its gradient reduce-scattered.
        output_layouts: what the sum becomes; default Replicate, ``Shard(1)`` for a reduce-scatter.
    """

    def __init__(
        self,
        *,
        parameters: Mapping[str, Placement] | None = None,
        divided: Sequence[str] = (),
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        self.parameters, self.divided = dict(parameters or {}), tuple(divided)
        self.input_layouts = checked_placement("input_layouts", input_layouts) or Replicate()
        self.output_layouts = checked_placement("output_layouts", output_layouts) or Replicate()

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`.

        Raises:
            ValueError: there is no such parameter or number, or the ranks do not divide the number.
        """
        shares = self._shares(module, device_mesh.size())
        for name, placement in self.parameters.items():
            self._place_named(module, name, placement, device_mesh)
        added = [name for name, placement in self.parameters.items() if is_partial(placement)]
        self.replicate(module, device_mesh)
        first = Boundary([Replicate()], device_mesh, given=[self.input_layouts])
        enter = Boundary([Replicate()], device_mesh)
        leave = Boundary([self.output_layouts], device_mesh, given=[Partial()])
        inner, info = forward_function(module), mesh_info(device_mesh)
        (axis,), names = info.names, parameter_names(module)[0][:1]

        @functools.wraps(inner)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            mesh = next((t.layout.info for t in _dtensors(args, kwargs) if t.layout.info is not info), info)

            def whole(value: Any) -> Any:
                return enter(_on_mesh(value, mesh) if mesh is not info else value)

            args, kwargs = _first_entered(first, names, args, kwargs) if mesh is info else (args, kwargs)
            args, kwargs = map_structure((args, kwargs), whole)
            parameters = spread_parameters(self)
            terms = _terms(self, added, axis)
            join_gradients([p for owner, _, p in parameters if id(p) not in terms and gives_terms(owner)], axis)
            pieces = _Pieces(self, info, _dtensors(args, kwargs), [parameter for _, _, parameter in parameters])

            def local(parameter: DTensor) -> torch.Tensor:
                return pieces.local(terms.get(id(parameter), parameter))

            with plain_parameters(parameters, local), _shared_out(self, shares):
                output = inner(self, *map_dtensors(args, pieces.local), **map_dtensors(kwargs, pieces.local))
            return _first_changed(output, lambda term: leave(pieces.wrapped(term)))

        set_forward(module, forward)
        return module

    def _shares(self, module: nn.Module, ranks: int) -> dict[str, int]:
        """This rank's share of each number that counts what is sharded."""
        counts = {name: getattr(module, name, None) for name in self.divided}
        for name, count in counts.items():
            if not isinstance(count, int) or count % ranks:
                raise ValueError(
                    f"LocalCompute(divided={self.divided}): {name} of {type(module).__name__} is {count!r}, no number "
                    f"that {ranks} ranks divide; use a number of ranks that does, or NoParallel() for this module"
                )
        return {name: count // ranks for name, count in counts.items() if count is not None}

    def _place_named(self, module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh) -> None:
        """Spread one parameter; of a LoRA layer, the factor at the split side too."""
        path, _, leaf = name.rpartition(".")
        owner: Any = module.get_submodule(path)
        layer = base_layer(owner)
        if leaf not in layer._parameters:
            raise ValueError(f"LocalCompute: {type(module).__name__} has no parameter {name!r}")
        if is_partial(placement):
            return  # it is Replicate, as all the others, and becomes a term when it is used
        self.place(layer, mesh, {leaf: placement})
        if layer is not owner and leaf == "weight":
            factors = owner.lora_B if getattr(placement, "dim", None) == 0 else owner.lora_A
            for factor in factors.values():
                self.place(factor, mesh, {"weight": placement})


def _terms(module: nn.Module, names: Sequence[str], axis: str) -> dict[int, DTensor]:
    """Parameters that are added once, by their id, as terms of a sum over the ranks."""
    terms: dict[int, DTensor] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        parameter: Any = base_layer(module.get_submodule(path))._parameters[leaf]
        if isinstance(parameter, DTensor):
            term = parameter.layout.with_placements({parameter.layout.info.axis(axis): Partial()})
            terms[id(parameter)] = remembered(parameter, term, parameter.spec.varying)
    return terms


def _first_entered(enter: Boundary, names: Sequence[str], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The first input, given by position or by name, as its style says."""
    if args:
        return (enter(args[0]), *args[1:]), kwargs
    return args, {name: enter(value) if name in names else value for name, value in kwargs.items()}


def _first_changed(output: Any, change: Callable[[Any], Any]) -> Any:
    """The output, or of a plain tuple its first entry, with the function done to each of its tensors."""
    if type(output) is tuple and output:
        return (map_structure(output[0], change), *output[1:])
    return map_structure(output, change)


@contextmanager
def _shared_out(module: nn.Module, shares: Mapping[str, int]) -> Iterator[None]:
    """The module with these numbers in the place of its own."""
    before = {name: getattr(module, name) for name in shares}
    vars(module).update(shares)
    try:
        yield
    finally:
        vars(module).update(before)


class _Pieces:
    """The tensors of one call as plain pieces, and what its outputs are pieces of.

    Over the style's own axis each rank computes a term. Over another axis ranks do so too where a tensor is sharded, or
    its gradient wanted in terms; elsewhere they all compute the same.
    """

    def __init__(
        self, module: nn.Module, own: MeshInfo, inputs: Sequence[DTensor], parameters: Sequence[DTensor]
    ) -> None:
        self.module, self.own = module, own
        self.like = max(inputs, key=self._sharded_axes, default=None)
        self.parted = {
            name
            for tensor in (*inputs, *parameters)
            for axis, name in enumerate(tensor.layout.info.names)
            if name in own.names or axis in tensor.spec.varying or not is_replicate(tensor.placements[axis])
        }
        for tensor in (*inputs, *parameters):
            self._check(tensor)

    def _others(self, tensor: DTensor) -> dict[str, Placement]:
        """Placements over the axes that are not the style's."""
        placements = zip(tensor.layout.info.names, tensor.placements, strict=True)
        return {name: placement for name, placement in placements if name not in self.own.names}

    def _sharded_axes(self, tensor: DTensor) -> int:
        return sum(not is_replicate(placement) for placement in self._others(tensor).values())

    def _check(self, tensor: DTensor) -> None:
        model = self._others(self.like) if self.like is not None else {}
        others = self._others(tensor)
        agrees = all(is_replicate(placement) or placement == model.get(name) for name, placement in others.items())
        if not agrees or not self.parted <= {*self.own.names, *others}:
            beside = f" beside {self.like.layout}" if self.like is not None else ""
            raise ValueError(
                f"LocalCompute: {type(self.module).__name__} got {tensor.layout}{beside}. Over other axes than "
                f"{', '.join(self.own.names)} its tensors must be Replicate, or sharded along the dimension of the "
                "first that is; parameters come to the mesh of a batch with fully_shard"
            )

    def local(self, tensor: DTensor) -> torch.Tensor:
        """This rank's piece, which sends back its own term of the gradient where ranks compute different things."""
        terms = varying_axes(tensor.layout, self._gradient(tensor.layout))
        return local_of(remembered(tensor, tensor.layout, tensor.spec.varying | terms))

    def _gradient(self, layout: Layout) -> list[Placement]:
        """Placements of the gradient of a piece, for ``grad_placements``."""

        def of(name: str, placement: Placement) -> Placement:
            if is_shard(placement):
                return placement
            return Partial() if is_replicate(placement) and name in self.parted else Replicate()

        return [of(name, placement) for name, placement in zip(layout.info.names, layout.placements, strict=True)]

    def wrapped(self, output: Any) -> Any:
        """A plain output as the piece that it is, where the call is on a larger mesh."""
        if self.like is None or self.like.layout.info is self.own or not isinstance(output, torch.Tensor):
            return output
        names = self.like.layout.info.names
        terms = {axis: Partial() for axis, name in enumerate(names) if name in self.own.names}
        layout = fit_rank(self.like.layout.with_placements(terms), output.ndim)
        shape = [
            self.like.shape[dim] if axes else length
            for dim, (length, axes) in enumerate(zip(output.shape, layout.shard_order, strict=True))
        ]
        return DTensor.from_local(output, layout, shape=shape, grad_placements=self._gradient(layout))


def _dtensors(*values: Any) -> list[DTensor]:
    return [tensor for tensor in tensors_of(values) if isinstance(tensor, DTensor)]


def _on_mesh(value: Any, mesh: MeshInfo) -> Any:
    """A value of a call on a larger mesh: plain tensors are the same on all its ranks, pending sums are due."""
    if isinstance(value, DTensor):
        due = {axis: Replicate() for axis, placement in enumerate(value.placements) if is_partial(placement)}
        return remembered(value, value.layout.with_placements(due)) if due else value
    if not isinstance(value, torch.Tensor):
        return value
    return taken_as(value, Layout.from_placements(mesh.mesh, [Replicate()] * mesh.ndim, ndim=value.ndim))
