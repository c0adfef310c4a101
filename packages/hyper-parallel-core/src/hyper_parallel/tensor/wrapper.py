"""The tensor objects of DTensors: no data, the global shape, and around them the local tensor and its spec."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel import torch_compat
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import DeviceMesh
from hyper_parallel.sharding.placements import Placement
from hyper_parallel.sharding.spec import Spec, dual
from hyper_parallel.tensor.autograd_bridge import InFlight

__all__ = ["Wrapper", "new_wrapper"]


class Wrapper(torch.Tensor):
    """What every DTensor has, and what it says of itself: that of the global tensor, from the spec."""

    # Read and set on every call, therefore slots.
    __slots__ = ("_local", "_pending", "_spec")
    _local: torch.Tensor
    _spec: Spec
    # What has to happen before the local tensor may be used; None in the common case.
    _pending: Any

    @property
    def spec(self) -> Spec:
        """All of this as one interned value; for authors of operators."""
        return self._spec

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """The :class:`Layout`, which equals ``torch.strided``, and is taken for it by functions that want one."""
        return self._spec.layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._spec.layout.mesh

    @property
    def grad_placements(self) -> tuple[Placement, ...]:
        """Placements of this tensor's gradient: Partial on the axes where the tensor is varying."""
        return dual(self._spec.layout, self._spec.varying)[0].placements

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        return self._spec.shape

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's piece."""
        return self._local.shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dimensions."""
        return len(self._spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Element type."""
        return self._spec.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of this rank's piece."""
        return self._local.device

    def size(self, dim: int | None = None) -> Any:
        """Global size, or that of one dimension."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self._spec.shape)

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return self._spec.shape.numel()

    def stride(self, dim: int | None = None) -> Any:
        """Global stride, or that of one dimension."""
        return self._spec.stride if dim is None else self._spec.stride[dim]

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __format__(self, format_spec: str) -> str:
        """``f"{loss:.3f}"`` formats the number of a 0-dim tensor, as ``item()`` gives it; ``f"{x}"`` is the
        ``repr``."""
        return (
            format(self.item(), format_spec) if format_spec and self.ndim == 0 else object.__format__(self, format_spec)
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter DTensor" if getattr(self, "_is_param", False) else "DTensor"
        layout = self._spec.layout
        text = f"{kind}(shape={tuple(self.shape)}, dtype={str(self.dtype)[6:]}, {layout!r}"
        if self._spec.varying:
            text += f", gradient Partial over {tuple(layout.mesh_dim_names[a] for a in sorted(self._spec.varying))}"
        if self.requires_grad:
            text += ", requires_grad=True"
        pending = ", in flight" if isinstance(self._pending, InFlight) else ""
        local = "" if pending else f", local={torch.Tensor.__repr__(self._local.detach())}"
        return text + pending + local + ")"


# PyTorch's constructor sets the local tensor by this name. It cannot be read: a library that finds it takes the tensor
# for PyTorch's DTensor and computes on the piece.
Wrapper._local_tensor = property(None, Wrapper._local.__set__)  # type: ignore[attr-defined]


def _new_wrapper(cls: type, local: torch.Tensor, spec: Spec, requires_grad: bool) -> Any:
    """A tensor of class ``cls`` without data: the spec's global shape and stride, the local tensor's dtype and device.

    C++ code that meets it ends in ``cls.__torch_dispatch__``, so it cannot take the piece for the whole.
    """
    meta = spec.tensor_meta
    result: Any = torch_compat.make_wrapper_subclass(
        cls, meta.shape, meta.stride, dtype=local.dtype, device=local.device, requires_grad=requires_grad
    )
    result._local, result._spec = local, spec
    return result


# The constructor that PyTorch has for its own DTensor does the same in C++, in half the time.
new_wrapper = torch_compat.new_dtensor or _new_wrapper
