"""What happens to values at a module's boundary; shard_module and the styles of parallelize_module share it."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel.context import implicit_replication, state
from hyper_parallel.conversion import remembered
from hyper_parallel.dtensor import DTensor
from hyper_parallel.layout import Layout, as_layout
from hyper_parallel.mesh import DeviceMesh
from hyper_parallel.placements import is_replicate, is_shard
from hyper_parallel.structures import rebuilt


class Boundary:
    """A declared layout at a module's input or output.

    Values are moved once per tensor: modules that share an input share its collective, and that of its gradient.

    Args:
        declared: :class:`Layout` or placements; None leaves values as they are. Of a DTensor on a larger mesh only the
            axes of this one change.
        mesh: the mesh of placements.
        user: the module that will use the value. Where its own parameters are sharded and the value is Replicate, each
            rank does different work with it, so its gradient is asked for in terms: the backward of a gather is then
            one reduce-scatter.
        given: what a plain tensor is this rank's piece of; by default ``declared``.
        in_flight: hand the value on while its collective is running; the first use waits.
    """

    def __init__(
        self,
        declared: Any,
        mesh: DeviceMesh,
        user: nn.Module | None = None,
        *,
        given: Any = None,
        in_flight: bool = False,
    ) -> None:
        self.declared, self.mesh, self.user, self.in_flight = declared, mesh, user, in_flight
        self.given = declared if given is None else given
        self._known: dict[Layout, tuple[Layout, frozenset[int]]] = {}

    def __call__(self, value: Any, shape: Sequence[int] | None = None) -> Any:
        """The value in the declared layout; what is no tensor passes.

        Args:
            value: a DTensor, or this rank's piece.
            shape: global shape of a plain tensor, where its pieces may be uneven.
        """
        if self.declared is None or not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, DTensor):
            value = taken_as(value, self._layout(self.given, value.ndim), shape)
        spec = value._spec
        layout, varying = self._known.get(spec.layout) or self._target(value)
        if spec.varying:
            varying |= frozenset(a for a in spec.varying if is_replicate(layout.placements[a]))
        return remembered(value, layout, varying, in_flight=self.in_flight)

    def _layout(self, declared: Any, ndim: int) -> Layout:
        return as_layout(declared if isinstance(declared, Layout) else self.mesh, declared, ndim)

    def _target(self, value: DTensor) -> tuple[Layout, frozenset[int]]:
        """Where a tensor in this layout has to go, and the axes on which its gradient is wanted in terms."""
        current = value.layout
        wanted = self._layout(self.declared, current.ndim)
        names = wanted.info.names
        if wanted.info is not current.info:
            if current.info.axes_beyond(wanted.info) is None:
                value.redistribute(wanted)  # says what is wrong
            wanted = current.with_placements(
                {current.info.axis(n): p for n, p in zip(names, wanted.placements, strict=True)}
            )
        sharded = _sharded_axes(self.user).intersection(names) if self.user is not None else set()
        axes = frozenset(wanted.info.axis(name) for name in sharded)
        axes = frozenset(a for a in axes if is_replicate(wanted.placements[a]))
        self._known[current] = wanted, axes
        return self._known[current]


def _sharded_axes(module: nn.Module) -> set[str]:
    """Names of the axes that shard a parameter of the module or of a child: the projections of an attention block are
    its children."""
    owners = (module, *module.children())
    return {
        parameter.layout.mesh_dim_names[axis]
        for parameter in itertools.chain.from_iterable(owner.parameters(recurse=False) for owner in owners)
        if isinstance(parameter, DTensor)
        for axis, p in enumerate(parameter.placements)
        if is_shard(p)
    }


# Plain tensor -> the DTensors that it was taken as. They refer to its storage and its place in the graph, not to the
# tensor itself, which would otherwise live for ever.
_taken: Any = WeakTensorKeyDictionary()


class _Alias(torch.autograd.Function):
    """The same values at the same place of the graph, as a tensor that does not refer to the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def taken_as(local: torch.Tensor, layout: Layout, shape: Sequence[int] | None = None) -> DTensor:
    """The DTensor of which a plain tensor is this rank's piece: the same one for all who ask, so that modules which
    share a plain input share the collectives on it and on its gradient, as long as it is not written to.

    A leaf that wants a gradient is taken anew each time: the graph would keep it, and so what is remembered, alive.
    """
    tracked = local.requires_grad and torch.is_grad_enabled()
    if local.is_inference() or (tracked and local.is_leaf):
        return DTensor.from_local(local, layout, shape=shape)
    forms = _taken.setdefault(local, {})
    key = (layout, None if shape is None else tuple(shape), tracked)
    version, taken = forms.get(key, (None, None))
    if taken is None or version != local._version:
        alias = _Alias.apply(local) if tracked else local.detach()
        taken = DTensor.from_local(alias, layout, shape=shape)
        forms[key] = (local._version, taken)
    return taken


def map_dtensors(value: Any, change: Callable[[DTensor], Any]) -> Any:
    """A structure (tuple, list, dict, ModelOutput) with its DTensors changed."""
    if isinstance(value, DTensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {k: map_dtensors(v, change) for k, v in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (tuple, list)):
        return rebuilt(value, [map_dtensors(v, change) for v in value])
    return value


NOT_COMPILED = (
    "torch.compile cannot trace DTensors of hyper_parallel: a module whose parameters are spread runs as it is. "
    "Compile the functions of plain tensors inside it, or leave out fullgraph=True"
)


def replicate_plain_inside(module: nn.Module) -> None:
    """Make plain tensors that meet DTensors inside the module's forward (buffers, masks, position ids) count as
    Replicate."""
    if getattr(module.forward, "_replicates_plain", False):
        return
    function = forward_function(module)

    def replicating(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if state.mode.replicate_plain:
            return function(self, *args, **kwargs)
        with implicit_replication():
            return function(self, *args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=NOT_COMPILED)
            return torch.compiler.disable(replicating, reason=NOT_COMPILED)(self, *args, **kwargs)
        return replicating(self, *args, **kwargs)

    functools.update_wrapper(forward, function)
    forward._replicates_plain = True  # type: ignore[attr-defined]
    set_forward(module, forward)


def forward_function(module: nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of the module and its inputs."""
    inner = module.forward
    if isinstance(inner, types.MethodType) and inner.__self__ is module:
        return inner.__func__

    @functools.wraps(inner)
    def function(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    signature, module_first = inspect.signature(inner), inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    changed = signature.replace(parameters=[module_first, *signature.parameters.values()])
    function.__signature__ = changed  # type: ignore[attr-defined]
    return function


def set_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let ``function(module, *inputs)`` be the module's forward: as a bound method and not as a closure over the
    module, so that ``copy.deepcopy`` binds it to the copy."""
    module.forward = types.MethodType(function, module)
