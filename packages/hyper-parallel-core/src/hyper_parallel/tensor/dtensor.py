"""DTensor: a local tensor and a spec that says which part of which global tensor it is.

Every torch function on a DTensor arrives in ``__torch_function__`` as the user wrote it, and the dispatcher runs it on
the local tensors. The autograd graph therefore lives on the **local** tensors; the wrapper holds no data, and C++ code
that meets it raises instead of computing on a piece as if it were the whole.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import _wiring
from hyper_parallel.comm.redistribute import (
    Dtypes,
    How,
    convert_gradient,
    describe,
    gradient_layout,
    has_other_reductions,
    target_spec,
    varying_axes,
)
from hyper_parallel.sharding.layout import Layout, _rebuild_layout, as_layout, as_layout_or_whole
from hyper_parallel.sharding.mesh import DeviceMesh, mesh_or_current
from hyper_parallel.sharding.placements import PackedShard, Partial, Placement, Replicate
from hyper_parallel.sharding.shard_ranges import local_shape
from hyper_parallel.sharding.spec import NOT_VARYING, Spec, dual, gradient_spec, make_spec
from hyper_parallel.sharding.stated import as_stated, stride_of_whole
from hyper_parallel.tensor import autograd_bridge, raw_memory
from hyper_parallel.tensor.autograd_bridge import Marks
from hyper_parallel.tensor.from_local_checks import (
    check_is_plain,
    check_ranks_agree,
    check_replicas_agree,
    global_shape,
)
from hyper_parallel.tensor.given_memory import note_given, note_leaf
from hyper_parallel.tensor.wrapper import Wrapper, new_wrapper
from hyper_parallel.torch_compat import refuse_memory

__all__ = ["DTensor", "wrap"]


class DTensor(Wrapper):
    """A tensor spread over a device mesh.

    Make one with :meth:`from_local`, :func:`hyper_parallel.distribute_tensor` or a factory such as
    ``hyper_parallel.zeros``. ``shape``, ``size``, ``stride``, ``numel``, ``len`` are those of the global tensor.
    """

    # Forms that were computed once (see redistribute_cache.remembered); never copied or pickled.
    _memo: dict[Any, Any] | None = None
    # Of a pending reduction: the form that was reduced once, with what it depends on.
    _reduced: redistribute_cache.RememberedForm | None = None
    # What this tensor was redistributed from, so that a later use as varying can fuse.
    _origin: redistribute_cache.Origin | None = None
    # The DTensor of which this one is a view, and the views of this one.
    _base_dtensor: Any = None
    _views: list[weakref.ref[DTensor]] = []  # noqa: RUF012 - replaced by a list of its own before it grows
    # Name of the view function whose result this is although it is a redistributed copy; of which tensor; the results
    # of the same call; and what writes it to the part of that tensor that it shows (see views).
    _copied_by: str | None = None
    _copy_of: DTensor | None = None
    _siblings: object = None
    _shows: Any = None
    # The redistributed copies that were taken where one device has views of this tensor.
    _copies: Sequence[weakref.ref[DTensor]] = ()
    # The DTensor whose ``.data`` this is.
    _tracked: Any = None
    # Number of this tensor's last in-place write with gradients (see autograd_bridge.Marks).
    _written_at: int = -1
    _grad_wrapper: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError("DTensor has no constructor: use DTensor.from_local, distribute_tensor or a factory like zeros")

    # -- making and unmaking --------------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | Layout | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Wrap this rank's piece; no communication unless ``run_check``.

        Args:
            local_tensor: this rank's piece, in the layout's local shape.
            device_mesh: the mesh, by default that of the ``with mesh:`` block around; or a :class:`Layout`.
            placements: one per mesh axis; by default Replicate.
            run_check: compare dtypes, shapes, and Replicate values, over the ranks (communicates).
            shape: global shape. Needed when the shards are uneven; by default every rank is taken to hold as much.
            stride: global stride; by default laid out like the local tensor, gaps included, or contiguous where a
                rank holds too little to tell. A local tensor that lies otherwise than its part of that is copied.
            grad_placements: placements of the local tensor's gradient. By default slices for Shard, the whole gradient
                for Replicate and Partial. ``Partial`` where the value is Replicate: each rank gets its own term, and
                the terms sum to the gradient.

        Raises:
            TypeError: ``local_tensor`` is a DTensor already or no tensor.
            ValueError: the local shape does not fit the layout and global shape; with ``run_check`` on every rank.
        """
        check_is_plain(local_tensor)
        layout = as_layout_or_whole(mesh_or_current(device_mesh, "from_local"), placements, local_tensor.ndim)
        shape = global_shape(local_tensor, layout, shape, stride)
        here = layout.info.my_coordinate()
        expected = local_shape(layout, shape, here)
        fits = tuple(local_tensor.shape) == expected
        if run_check:
            check_ranks_agree(fits, layout, shape, local_tensor.dtype)
        if not fits:
            raise ValueError(
                f"from_local: local shape {tuple(local_tensor.shape)} does not fit global shape {shape} with "
                f"{describe(layout)}: rank at {here} holds {expected}. "
                "Pass shape= with the global shape when the shards are uneven"
            )
        if run_check and not local_tensor.is_meta:
            check_replicas_agree(local_tensor, layout, shape)
        base = local_tensor._base if local_tensor._is_view() else local_tensor
        if base is not None and base.is_leaf:
            note_leaf(base)
        full_stride = tuple(stride) if stride is not None else stride_of_whole(local_tensor, shape, layout)
        gradient = gradient_layout(layout, NOT_VARYING, grad_placements)
        if local_tensor.requires_grad and torch.is_grad_enabled() and local_tensor.is_leaf:
            local_tensor = local_tensor.view_as(local_tensor)  # so that the DTensor is no leaf itself
        varying = NOT_VARYING if grad_placements is None else varying_axes(layout, grad_placements)
        if local_tensor.requires_grad and torch.is_grad_enabled() and grad_placements is not None:
            local_tensor = convert_gradient(local_tensor, dual(layout, varying), gradient, shape)
        spec = make_spec(layout, shape, full_stride, local_tensor.dtype, varying)
        return wrap(as_stated(local_tensor, spec), spec)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's piece, connected to the autograd graph.

        Its memory is yours to write to from now on, so what was computed of this tensor in other layouts is computed
        anew for the next operator that needs it: call this on all ranks, or on none.

        Args:
            grad_placements: placements of the gradient that your local computation will send back, one per mesh axis.
                By default the tensor's own: for Replicate the whole gradient on every rank. Say ``Partial()`` when
                each rank computes on its own data, so that the terms are summed.
        """
        note_given(self._resolve())
        return self._piece(grad_placements)

    def _piece(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As :meth:`to_local`, for code of this library (see :func:`hyper_parallel.tensor.given_memory.local_of`)."""
        local = self._resolve()
        if grad_placements is None or not (local.requires_grad and torch.is_grad_enabled()):
            return local
        spec = self._spec
        given = gradient_layout(spec.layout, spec.varying, grad_placements)
        return convert_gradient(local, given, dual(spec.layout, spec.varying), tuple(spec.shape))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank, as a plain tensor. All ranks of the mesh must call it.

        Args:
            grad_placements: as in :meth:`to_local`, for the Replicate result. By default every rank sends back the
                same, whole gradient.
        """
        if grad_placements is None:
            grad_placements = [Replicate()] * len(self.placements)
        return self.redistribute(self._spec.layout.replicated(), grad_placements=grad_placements).to_local()

    def redistribute(
        self,
        device_mesh: DeviceMesh | Layout | None = None,
        placements: Sequence[Placement] | Layout | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The same tensor in another layout of the same mesh, by the fewest bytes; differentiable.

        Args:
            device_mesh: the tensor's mesh (default), or the target :class:`Layout`.
            placements: target placements, one per mesh axis, or a Layout.
            async_op: return at once; the first use waits.
            forward_dtype: dtype of the result; the tensor is cast before it is sent. By default the tensor's own.
            backward_dtype: what the gradient is cast to before it is sent back; it arrives in the tensor's dtype. By
                default that one.
            wire_dtype: dtype in which the values are sent, where that is not the result's; rounds nothing where nothing
                is sent. (That of the gradient is ``backward_dtype``.)
            grad_placements: of the result, as in :meth:`from_local`. ``Partial()`` where the target is Replicate says
                that each rank will use the result for different work: the backward of an all-gather is then one
                reduce-scatter.

        Raises:
            ValueError: for another mesh, or placements that do not fit the tensor.
        """
        spec = self._spec
        if isinstance(device_mesh, DeviceMesh) and device_mesh != spec.layout.mesh:
            raise ValueError(
                f"redistribute stays on one mesh: the tensor is on {spec.layout.info!r}, got {device_mesh}"
            )
        if isinstance(device_mesh, Layout):
            layout = as_layout(device_mesh, None, self.ndim)
        else:
            layout = as_layout(spec.layout.mesh, placements, self.ndim)
        if layout.info is not spec.layout.info:
            raise ValueError(
                f"redistribute stays on one mesh: the tensor is on {spec.layout.info!r}, got {layout.info!r}"
            )
        varying = None
        if grad_placements is not None:
            gradient_layout(layout, NOT_VARYING, grad_placements)  # raises when they do not fit
            varying = varying_axes(layout, grad_placements)
        target = target_spec(spec, layout, varying)
        dtypes = Dtypes.given(spec.dtype, forward_dtype, backward_dtype, wire_dtype)
        if dtypes is not None and dtypes.result != spec.dtype:
            target = target.replace(dtype=dtypes.result)
        return redistribute_cache.convert(self, target, How(dtypes, want_pending=async_op))

    def reduce_partial(self) -> DTensor:
        """Every pending reduction carried out: Partial becomes Replicate. Computed once per tensor."""
        layout = self._spec.layout
        if not layout.is_partial():
            return self
        pending = {a: Replicate() for a, p in enumerate(layout.placements) if isinstance(p, Partial)}
        return redistribute_cache.remembered(self, layout.with_placements(pending))

    # -- autograd: the graph is that of the local tensor ----------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient is wanted."""
        return self._local.requires_grad or (self._pending is not None and autograd_bridge.wrapper_requires_grad(self))

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Ask for a gradient, in place; only for leaves. A pending average, maximum and so on is carried out: only sums
        carry gradients."""
        if requires_grad and has_other_reductions(self._spec.layout) and self.is_leaf:
            in_place.carry_out(self)
        self._resolve().requires_grad_(requires_grad)
        autograd_bridge.set_wrapper_requires_grad(self, requires_grad)
        return self

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Node that made this tensor: the local one, or that of an ``autograd.Function`` applied to DTensors."""
        node = autograd_bridge.wrapper_grad_fn(self) if self._pending is not None else None
        return self._local.grad_fn if node is None else node

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether no operation made this tensor."""
        return self.grad_fn is None

    @property
    def grad(self) -> DTensor | None:
        """The gradient as a DTensor; a parameter's has the parameter's layout."""
        local = self._local.grad
        if local is None:
            return None
        if self._grad_wrapper is None or self._grad_wrapper._local is not local:
            stated = gradient_spec(self._spec, local.dtype)
            fitting = as_stated(local, stated)
            if fitting is not local:  # a retained gradient lies as it came
                self._local.grad = fitting
            self._grad_wrapper = wrap(fitting, stated)
        return self._grad_wrapper

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self._local.grad = None
            return
        if not isinstance(value, DTensor) or value.shape != self.shape:
            kind = ValueError if isinstance(value, DTensor) else TypeError
            raise kind(
                f"the gradient of a DTensor of shape {tuple(self.shape)} is a DTensor of that shape, got "
                f"{type(value).__name__} of shape {tuple(value.shape)}"
            )
        value = redistribute_cache.convert(
            value, target_spec(value._spec, *dual(self._spec.layout, self._spec.varying))
        )
        self._local.grad = value._resolve()
        self._grad_wrapper = value

    @grad.deleter
    def grad(self) -> None:
        self._local.grad = None

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Compute gradients as ``torch.Tensor.backward`` does; a scalar's seed counts once over all ranks."""
        autograd_bridge.backward((self,), None if gradient is None else (gradient,), retain_graph, create_graph, inputs)

    def detach(self) -> DTensor:
        """The same data without history."""
        detached = wrap(self._resolve().detach(), self._spec)
        detached._tracked = self._tracked
        return self._shared(detached)

    def detach_(self) -> DTensor:
        """Drop the history in place."""
        self._resolve().detach_()
        autograd_bridge.forget_node(self)
        autograd_bridge.set_wrapper_requires_grad(self, False)
        return self

    def retain_grad(self) -> None:
        """Keep ``.grad`` of a non-leaf."""
        self._origin = None  # the gradient must pass here
        autograd_bridge.with_history(self).retain_grad()

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        """Whether a non-leaf keeps its ``.grad``."""
        return autograd_bridge.with_history(self).retains_grad

    def register_hook(self, hook: Callable[[DTensor], Any]) -> Any:
        """Call ``hook`` with the gradient as a DTensor (Partial on varying axes); it may return another."""
        self._origin = None  # the gradient must pass here
        spec = self._spec

        def local_hook(grad: torch.Tensor) -> torch.Tensor | None:
            given = wrap_gradient(grad, spec)
            result, wanted = hook(given), given._spec
            if result is None:
                return None
            if not isinstance(result, DTensor):
                raise TypeError(f"a hook of a DTensor returns a DTensor or None, got {type(result).__name__}")
            return redistribute_cache.convert(
                result, target_spec(result._spec, wanted.layout, wanted.varying)
            )._resolve()

        return autograd_bridge.with_history(self).register_hook(local_hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[DTensor], None]) -> Any:
        """Call ``hook`` with this parameter after its gradient was accumulated."""
        this = weakref.ref(self)  # the local tensor holds the hook: a reference back would be a cycle

        def local_hook(_: torch.Tensor) -> None:
            parameter = this()
            if parameter is not None:
                hook(parameter)

        return self._resolve().register_post_accumulate_grad_hook(local_hook)

    @property  # type: ignore[override]
    def data(self) -> DTensor:
        """The same data without history, untracked. What is assigned is laid out as this tensor is."""
        local = self._resolve()
        note_given(local)
        untracked = wrap(local.data, self._spec)
        untracked._tracked = self if self._tracked is None else self._tracked
        return self._shared(untracked)

    @data.setter
    def data(self, value: DTensor) -> None:
        if not isinstance(value, DTensor):
            raise TypeError(
                f".data of a DTensor is set to a DTensor, got {type(value).__name__}; see distribute_tensor"
            )
        value = self._laid_out(value)
        local, spec = self._resolve(), value._spec
        local.data = value._resolve().data
        note_given(local)  # it is the memory of the other tensor too, whose version tells nothing here
        self.forget_forms()
        if (spec.dtype, spec.shape, spec.stride, local.device) != (self.dtype, self.shape, self.stride(), self.device):
            autograd_bridge.renew_wrapper(self, spec, local.device, self.requires_grad)
        self._spec = spec

    def _laid_out(self, value: DTensor) -> DTensor:
        """``value`` in this tensor's layout."""
        layout, given = self._spec.layout, value._spec.layout
        if given is layout:
            return value
        if given.info is not layout.info or given.ndim != layout.ndim:
            raise ValueError(
                f".data of a DTensor keeps its layout: {layout} of {layout.ndim} dimensions, and the value is laid out "
                f"as {given} of {given.ndim}. redistribute() the value to that mesh, or make a new parameter of it"
            )
        with torch.no_grad():
            return redistribute_cache.convert(value.detach(), target_spec(value._spec, layout))

    def _shared(self, other: DTensor) -> DTensor:
        """``other``, which shares this tensor's memory; noted as a view where an in-place operator would part them."""
        if has_other_reductions(self._spec.layout):
            views.note_view(other, self)
        return other

    def forget_forms(self) -> None:
        """Drop what was computed of this tensor in other layouts: its data changed in a way that the version of the
        local tensor does not tell, such as by a kernel of your own or by ``to_local().data = ...``."""
        self._memo = self._reduced = self._origin = None

    def _resolve(self) -> torch.Tensor:
        """The local tensor, ready for use: waited for, and joined to the local autograd graph."""
        if self._pending is not None:
            autograd_bridge.settle(self)
        return self._local

    # -- copying --------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only DTensors without history (graph leaves) can be deep-copied; detach() first")
        copied = wrap(copy.deepcopy(self._resolve(), memo), self._spec)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(_travelling_attributes(self), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        spec = self._spec
        parts = (self._resolve().detach(), spec.layout, tuple(spec.shape), spec.stride, tuple(spec.varying))
        return (_rebuild_dtensor, (*parts, self.requires_grad, _travelling_attributes(self)))

    # -- memory, and the distributed checkpoint -------------------------------------------------------------------

    def data_ptr(self) -> int:
        """Refused: a DTensor has no memory of its own. See ``to_local().data_ptr()``."""
        raise raw_memory.refusal("data_ptr()")

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return dcp_protocol.write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return dcp_protocol.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return dcp_protocol.tensor_shard(self, index)

    # -- PyTorch's own DTensor ------------------------------------------------------------------------------------

    @staticmethod
    def from_torch(tensor: Any) -> DTensor:
        """Take over a ``torch.distributed.tensor.DTensor``; the local tensor is shared."""
        return torch_interop.from_torch(tensor)

    def to_torch(self) -> Any:
        """The same tensor as a ``torch.distributed.tensor.DTensor``; the local tensor is shared."""
        return torch_interop.to_torch(self)

    # -- dispatch -------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Until the dispatcher is loaded, which takes this place.
        _wiring.load_dispatcher()
        return DTensor.__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return autograd_bridge.guard(func, args, kwargs or {})


def wrap(local: torch.Tensor, spec: Spec) -> DTensor:
    """A DTensor around ``local``; the caller vouches that it fits ``spec``."""
    result: DTensor = new_wrapper(DTensor, local, spec, local.requires_grad)
    refuse_memory(result)
    result._pending = None if torch.is_grad_enabled() else Marks.now
    return result


def wrap_gradient(grad: torch.Tensor, spec: Spec) -> DTensor:
    """A local gradient of a tensor with ``spec`` as a DTensor."""
    stated = gradient_spec(spec, grad.dtype)
    return wrap(as_stated(grad, stated), stated)


def _travelling_attributes(tensor: DTensor) -> dict[str, Any]:
    """Attributes that a copy has too: those of users, and that it is a parameter."""
    return {name: value for name, value in vars(tensor).items() if name not in DTensor.__annotations__}


def _rebuild_dtensor(
    local: torch.Tensor,
    layout: Layout,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    varying: tuple[int, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> DTensor:
    result = wrap(
        local.requires_grad_(requires_grad), make_spec(layout, shape, stride, local.dtype, frozenset(varying))
    )
    result.__dict__.update(attributes)
    return result


# What a saved DTensor consists of: torch.load(weights_only=True) may come before any mesh is made.
torch.serialization.add_safe_globals([_rebuild_dtensor, _rebuild_layout, Layout, PackedShard])
# Under the names that they had in files of before (see _old_paths).
torch.serialization.add_safe_globals(
    [
        (_rebuild_dtensor, "hyper_parallel.dtensor._rebuild_dtensor"),
        (_rebuild_layout, "hyper_parallel.layout._rebuild_layout"),
        (Layout, "hyper_parallel.layout.Layout"),
        (PackedShard, "hyper_parallel.placements.PackedShard"),
    ]
)

# They need the class.
from hyper_parallel.tensor import dcp_protocol, in_place, redistribute_cache, torch_interop, views  # noqa: E402
