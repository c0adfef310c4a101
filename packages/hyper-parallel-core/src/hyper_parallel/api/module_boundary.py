"""What happens to values at a module's boundary; shard_module and the styles of parallelize_module share it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel.context import state
from hyper_parallel.sharding.layout import Layout, as_layout
from hyper_parallel.sharding.mesh import DeviceMesh
from hyper_parallel.sharding.placements import is_replicate, is_shard
from hyper_parallel.sharding.spec import Spec
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.tensor.from_local_checks import check_is_plain
from hyper_parallel.tensor.redistribute_cache import remembered
from hyper_parallel.utils.structures import map_structure


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
        features: length of the last dim of plain tensors, where pieces of it may be uneven.
        in_flight: hand the value on while its collective is running; the first use waits.
    """

    def __init__(
        self,
        declared: Any,
        mesh: DeviceMesh,
        user: nn.Module | None = None,
        *,
        given: Any = None,
        features: int | None = None,
        in_flight: bool = False,
    ) -> None:
        self.declared, self.mesh, self.user, self.in_flight = declared, mesh, user, in_flight
        self.given = declared if given is None else given
        self.features = features
        self._known: dict[Layout, tuple[Layout, frozenset[int]]] = {}
        self._plain: dict[int, tuple[Layout, int | None, bool]] = {}

    def __call__(self, value: Any) -> Any:
        """The value, a DTensor or this rank's piece, in the declared layout; what is no tensor passes."""
        if value.__class__ is not DTensor:
            if not isinstance(value, torch.Tensor) or self.declared is None:
                return value
            layout, features, shared = self._plain.get(value.ndim) or self._plain_of(value.ndim)
            shape = None if features is None else (*value.shape[:-1], features)
            value = taken_as(value, layout, shape, shared=shared)
        elif self.declared is None:
            return value
        spec = value._spec
        layout, varying = self._known.get(spec.layout) or self._target(spec.layout)
        if layout is spec.layout and varying <= spec.varying:
            return value
        if spec.varying:
            varying |= frozenset(a for a in spec.varying if is_replicate(layout.placements[a]))
        return remembered(value, layout, varying, in_flight=self.in_flight)

    def is_in_place(self, value: Any) -> bool:
        """Whether a value is a plain tensor that is, as it is, this rank's piece in the declared layout."""
        return value.__class__ is torch.Tensor and not (self._plain.get(value.ndim) or self._plain_of(value.ndim))[2]

    def _plain_of(self, ndim: int) -> tuple[Layout, int | None, bool]:
        """What a plain tensor is taken as: its layout, the length of its last dim where that is sharded and known, and
        whether others may move it too."""
        layout = self._layout(self.given, ndim)
        features = self.features if layout.shard_order[-1:] not in ((), ((),)) else None
        moves = self._target(layout)[0] is not layout or any(is_replicate(p) for p in layout.placements)
        self._plain[ndim] = layout, features, moves
        return self._plain[ndim]

    def _layout(self, declared: Any, ndim: int) -> Layout:
        return as_layout(declared if isinstance(declared, Layout) else self.mesh, declared, ndim)

    def _target(self, current: Layout) -> tuple[Layout, frozenset[int]]:
        """Where a tensor in this layout has to go, and the axes on which its gradient is wanted in terms."""
        wanted = self._layout(self.declared, current.ndim)
        names = wanted.info.names
        if wanted.info is not current.info:
            if current.info.axes_beyond(wanted.info) is None:
                raise ValueError(f"a boundary on the mesh {wanted.info!r} got a tensor on the mesh {current.info!r}")
            wanted = current.with_placements(
                {current.info.axis(n): p for n, p in zip(names, wanted.placements, strict=True)}
            )
        sharded = _sharded_axes(self.user).intersection(names) if self.user is not None else set()
        axes = frozenset(wanted.info.axis(name) for name in sharded)
        axes = frozenset(a for a in axes if is_replicate(wanted.placements[a]))
        if len(self._known) >= _KINDS:  # sections of another length at every step, say
            self._known.clear()
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


# Plain tensor -> the DTensors that it was taken as; an entry lives as long as its tensor. The DTensors refer to its
# storage and its place in the graph, not to the tensor itself, which would otherwise live for ever.
_taken: Any = WeakTensorKeyDictionary()

# What from_local makes of pieces of one kind, once it has checked them. A cache: it may be emptied at any time.
_specs_taken: dict[Any, Spec] = {}
_KINDS = 1024  # a full table starts afresh


class _Alias(torch.autograd.Function):
    """The same values at the same place of the graph, as a tensor that does not refer to the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def taken_as(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...] | None = None, *, shared: bool = True
) -> DTensor:
    """The DTensor of which a plain tensor is this rank's piece: the same one for all who ask, so that modules which
    share a plain input share the collectives on it and on its gradient, as long as it is not written to.

    A leaf that wants a gradient is taken anew each time: the graph would keep it, and so what is remembered, alive.
    So is one on which no collectives are due here (not ``shared``). What is taken inside the call of a parallelised
    module serves that one only; outside of such calls a leaf is taken anew each time, as its owner may write to it
    unseen (a buffer that is filled with one batch after the other).
    """
    tracked = local.requires_grad and torch.is_grad_enabled()
    kind = (layout, shape, local.__class__, local.shape, local.stride(), local.dtype)
    spec = _specs_taken.get(kind)
    if spec is None:
        if len(_specs_taken) >= _KINDS:
            _specs_taken.clear()
        check_is_plain(local)
        alike = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        spec = _specs_taken[kind] = DTensor.from_local(alike, layout, shape=shape).spec
    if tracked and local.is_leaf:
        return wrap(local.view_as(local), spec)
    if not shared or local.is_inference() or (local.is_leaf and state.call is None):
        return wrap(local, spec)
    forms = _taken.setdefault(local, {})
    key = (spec, tracked)
    version, call, taken = forms.get(key, (None, None, None))
    if taken is None or version != local._version or (call is not None and call is not state.call):
        taken = wrap(_Alias.apply(local) if tracked else local.detach(), spec)
        forms[key] = (local._version, state.call, taken)
    return taken


def map_dtensors(value: Any, change: Callable[[DTensor], Any]) -> Any:
    """What a module takes or returns with its DTensors changed."""
    return map_structure(value, lambda tensor: change(tensor) if isinstance(tensor, DTensor) else tensor)
