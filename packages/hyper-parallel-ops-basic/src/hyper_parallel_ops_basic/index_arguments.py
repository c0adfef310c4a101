"""What an index such as ``x[0, :, None, ids, mask]`` says about each dimension, before any rule looks at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hyper_parallel.call import Ref

Kind = Literal["new", "int", "range", "tensor", "mask"]


@dataclass(frozen=True)
class Item:
    """One part of an index.

    Attributes:
        kind: a new dim, an int, a slice, an integer tensor (or list), or a bool mask.
        dim: dimension of the tensor that it reads; the first one for a mask, which reads several.
        value: the int (None where a 0-dim tensor holds it), the range, or the shape of the tensor, list or mask.
        where: position in the index tuple; None for dims that the index leaves out.
        ref: the index tensor, when it is one.
    """

    kind: Kind
    dim: int
    value: Any
    where: int | None
    ref: Ref | None = None


class Index:
    """A parsed index.

    Attributes:
        items: its parts in the order of the tensor's dims.
        result: per dim of the result, the dim of the tensor that it shows, or None for a new or gathered dim.
        gathered: first dim of the result that the index tensors make; None without index tensors.
        broadcast: shape that the index tensors broadcast to; None when a mask makes it depend on data.
    """

    def __init__(self, index: Any, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.items = _items(index if isinstance(index, tuple) else (index,), self.shape)
        advanced = [i for i in self.items if i.kind in ("tensor", "mask")]
        self.has_mask = any(i.kind == "mask" for i in advanced)
        self.broadcast: tuple[int, ...] | None = None
        if advanced and not self.has_mask:
            self.broadcast = tuple(torch.broadcast_shapes(*(i.value for i in advanced)))
        # As PyTorch does it: ints, slices and None first, then the index tensors on what is left.
        left = [i for i in self.items if i.kind != "int"]
        places = [p for p, i in enumerate(left) if i in advanced]
        self.gathered: int | None = None
        self.result: list[int | None] = []
        if places:
            together = places == list(range(places[0], places[0] + len(places)))
            self.gathered = places[0] if together else 0
        count = 1 if self.broadcast is None else len(self.broadcast)
        plain = [i.dim if i.kind == "range" else None for i in left if i not in advanced]
        at = self.gathered or 0
        self.result = plain if not places else [*plain[:at], *[None] * count, *plain[at:]]

    @property
    def is_basic(self) -> bool:
        """Whether the result is a view."""
        return self.gathered is None

    def gathered_dims(self) -> list[int]:
        """Dims of the tensor that index tensors or masks read."""
        dims: list[int] = []
        for item in self.items:
            if item.kind == "tensor":
                dims.append(item.dim)
            elif item.kind == "mask":
                dims.extend(range(item.dim, item.dim + len(item.value)))
        return dims

    def ranges(self) -> dict[int, range]:
        """The picked range of every dim that has one."""
        return {i.dim: i.value for i in self.items if i.kind == "range"}

    def ints(self) -> list[Item]:
        """The ints, each of which removes a dim."""
        return [i for i in self.items if i.kind == "int"]

    def tensors(self) -> list[Item]:
        """The index tensors and lists, masks not counted."""
        return [i for i in self.items if i.kind == "tensor"]

    @property
    def mask(self) -> Item | None:
        """The mask, when there is one."""
        return next((i for i in self.items if i.kind == "mask"), None)

    def on_meta(self, given: Any) -> tuple[Any, ...]:
        """The index for a meta tensor, whose ints a meta tensor cannot hold."""
        given = given if isinstance(given, tuple) else (given,)
        unread = {i.where for i in self.ints() if i.ref is not None}
        return tuple(0 if where in unread else part for where, part in enumerate(given))

    def with_picked(self, given: Sequence[Any], count: int) -> tuple[Any, ...]:
        """The index for a meta tensor, where the mask is the ``count`` indices per dim that ``nonzero`` gives of it."""
        parts: list[list[Any]] = [[part] for part in self.on_meta(tuple(given))]
        for item in self.tensors():
            parts[item.where or 0] = [_meta_indices(item.value)]
        if (mask := self.mask) is not None:
            at = mask.where or 0
            picked: list[Any] = [_meta_indices((count,))] * len(mask.value)
            parts[at] = picked or [bool(given[at])]
        return tuple(part for expanded in parts for part in expanded)


def _meta_indices(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.int64, device="meta")


def _items(index: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Item, ...]:
    reads = [_dims_read(part) for part in index]
    left = len(shape) - sum(reads)
    if left < 0:
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    dots = sum(part is Ellipsis for part in index)
    if dots > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    items: list[Item] = []
    dim = 0
    for where, part in enumerate(index):
        if part is Ellipsis:
            items += [Item("range", d, range(shape[d]), None) for d in range(dim, dim + left)]
            dim += left
            continue
        items.append(_item(part, dim, shape, where))
        dim += reads[where]
    items += [Item("range", d, range(shape[d]), None) for d in range(dim, len(shape))]
    return tuple(items)


def _dims_read(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, bool):
        return 0
    if isinstance(part, Ref) and part.dtype in (torch.bool, torch.uint8):
        return len(part.shape)
    if isinstance(part, (list, tuple)):
        found = torch.as_tensor(part)
        return found.ndim if found.dtype is torch.bool else 1
    return 1


def _item(part: Any, dim: int, shape: tuple[int, ...], where: int) -> Item:
    if part is None:
        return Item("new", dim, None, where)
    if isinstance(part, bool):
        return Item("mask", dim, (), where)
    if isinstance(part, slice):
        return Item("range", dim, range(shape[dim])[part], where)
    if isinstance(part, Ref):
        mask = part.dtype in (torch.bool, torch.uint8)
        if not part.shape and not mask:
            return Item("int", dim, None, where, part)
        return Item("mask" if mask else "tensor", dim, tuple(part.shape), where, part)
    if isinstance(part, (list, tuple)):
        found = torch.as_tensor(part)
        return Item("mask" if found.dtype is torch.bool else "tensor", dim, tuple(found.shape), where)
    if hasattr(part, "__index__"):
        value, size = part.__index__(), shape[dim]
        if not -size <= value < size:
            raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {size}")
        return Item("int", dim, value % size, where)
    raise TypeError(f"a DTensor cannot be indexed with {type(part).__name__} {part!r}")
