"""What an index such as ``x[0, :, None, ids, mask]`` says about each dimension, before any rule looks at it."""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hyper_parallel.rules import Ref, check_in_range

Kind = Literal["new", "int", "range", "tensor", "mask", "column"]


@dataclass(frozen=True)
class Item:
    """One part of an index.

    Attributes:
        kind: a new dim, an int, a slice, an integer tensor (or list), a bool mask, or a column: the positions along one
            dim, in a rank's piece, of what a mask picks.
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

    @property
    def dims(self) -> range:
        """The dims of the tensor that it reads."""
        return range(self.dim, self.dim + (len(self.value) if self.kind == "mask" else 1))


class Index:
    """A parsed index.

    Attributes:
        items: its parts in the order of the tensor's dims.
        result: per dim of the result, the dim of the tensor that it shows, or None for a new or gathered dim.
        gathered: dims of the result that the index tensors and masks make; empty without them.
        broadcast: shape that the index tensors broadcast to; None when a mask makes it depend on data.
    """

    def __init__(self, index: Any, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.items = _items(parts_of(index), self.shape)
        advanced = [i for i in self.items if i.kind in ("tensor", "mask")]
        self.has_mask = any(i.kind == "mask" for i in advanced)
        self.broadcast: tuple[int, ...] | None = None
        if advanced and not self.has_mask:
            self.broadcast = _broadcast([i.value for i in advanced])
        # As PyTorch does it: ints, slices and None first, then the index tensors on what is left.
        left = [i for i in self.items if i.kind != "int"]
        places = [p for p, i in enumerate(left) if i in advanced]
        together = places == list(range(places[0], places[0] + len(places))) if places else False
        at = places[0] if together else 0
        count = max((1 if i.kind == "mask" else len(i.value) for i in advanced), default=0)
        self.gathered = range(at, at + count) if places else range(0)
        plain = [i.dim if i.kind == "range" else None for i in left if i not in advanced]
        self.result: list[int | None] = [*plain[:at], *[None] * count, *plain[at:]]

    @property
    def is_basic(self) -> bool:
        """Whether the result is a view."""
        return not any(i.kind in ("tensor", "mask") for i in self.items)

    @property
    def picked(self) -> int:
        """The dim of the result along which the elements that a mask picks lie: the last that index tensors make."""
        return self.gathered[-1]

    def ranges(self) -> dict[int, range]:
        """The picked range of every dim that has one."""
        return {i.dim: i.value for i in self.items if i.kind == "range"}

    def ints(self) -> list[Item]:
        """The ints, each of which removes a dim."""
        return [i for i in self.items if i.kind == "int"]

    def tensors(self) -> list[Item]:
        """The index tensors and lists, masks not counted."""
        return [i for i in self.items if i.kind == "tensor"]

    def masks(self) -> list[Item]:
        """The masks."""
        return [i for i in self.items if i.kind == "mask"]

    def with_columns(self, here: Item | None) -> Index:
        """The index with the columns of masks in their place, as index tensors; they are the last parts of the index
        tuple. Those of the mask ``here`` are positions in a rank's piece."""
        found, items = copy.copy(self), list[Item]()
        where = -sum(len(mask.value) for mask in self.masks())
        for item in self.items:
            if item.kind != "mask" or not item.value:  # True and False have no column
                items.append(item)
                continue
            kind: Kind = "column" if item is here else "tensor"
            items += [Item(kind, d, (None,), where + number) for number, d in enumerate(item.dims)]
            where += len(item.value)
        found.items = tuple(items)
        return found

    def result_shape(self) -> list[int | None]:
        """Shape of the result; None for the sizes that only the data of a mask tells."""
        ranges = self.ranges()
        sizes: list[int | None] = [1 if d is None else len(ranges[d]) for d in self.result]
        for place, at in enumerate(self.gathered):
            sizes[at] = None if self.broadcast is None else self.broadcast[place]
        return sizes

    def check_value(self, shape: Sequence[int], leading_ones: bool) -> None:
        """Whether a value of this shape can be written to what the index picks, as far as no mask has to be read.

        Args:
            leading_ones: whether dims of size 1 that the picked elements have not may come first.

        Raises:
            RuntimeError: when it cannot, as in PyTorch.
        """
        wanted = self.result_shape()
        beyond = len(shape) - len(wanted)
        fits = all(n in (1, want) or want is None for n, want in zip(shape[::-1], wanted[::-1], strict=False))
        if not fits or (beyond > 0 and not (leading_ones and all(n == 1 for n in shape[:beyond]))):
            known = ", ".join("?" if n is None else str(n) for n in wanted)
            raise RuntimeError(
                f"shape mismatch: value tensor of shape {list(shape)} cannot be broadcast to indexing result of shape "
                f"[{known}]"
            )

    def on_meta(self, given: Any) -> tuple[Any, ...]:
        """The index for a meta tensor, whose ints a meta tensor cannot hold."""
        unread = {i.where for i in self.ints() if i.ref is not None}
        return tuple(0 if where in unread else part for where, part in enumerate(parts_of(given)))

    def with_picked(self, given: Sequence[Any], count: int) -> tuple[Any, ...]:
        """The index for a meta tensor, where masks are the ``count`` indices per dim that ``nonzero`` gives of them."""
        parts: list[list[Any]] = [[part] for part in self.on_meta(tuple(given))]
        for item in self.tensors():
            parts[item.where or 0] = [_meta_indices(item.value) if item.ref is None else item.ref.spec.meta]
        for mask in self.masks():
            at = mask.where or 0
            picked: list[Any] = [_meta_indices((count,))] * len(mask.value)
            parts[at] = picked or [bool(given[at])]
        return tuple(part for expanded in parts for part in expanded)


def parts_of(index: Any) -> tuple[Any, ...]:
    """The parts of an index. A short list that holds more than numbers counts as a tuple, as in PyTorch."""
    if isinstance(index, tuple):
        return index
    is_many = isinstance(index, list) and len(index) < 32 and any(_is_part(part) for part in index)
    return tuple(index) if is_many else (index,)


def _is_part(part: Any) -> bool:
    return part is None or part is Ellipsis or isinstance(part, (slice, Ref, torch.Tensor)) or _is_table(part)


def asked_for(item: Item, shape: tuple[int, ...], given: Sequence[Any]) -> Any:
    """A part of the index as a local call has it: a slice of the whole, an int in range, None, a tensor or a list.

    Raises:
        IndexError: for an int in a tensor that is out of range.
    """
    if item.kind == "range":
        picked = item.value
        return slice(None) if picked == range(shape[item.dim]) else slice(picked.start, picked.stop, picked.step)
    if item.kind == "int":
        return item.value if item.ref is None else _in_range(int(given[item.where or 0]), item.dim, shape[item.dim])
    return None if item.kind == "new" else given[item.where or 0]


def as_ids(part: Any, device: torch.device | None = None) -> torch.Tensor:
    """Integer indices as a tensor, of what may be a list."""
    found = part if isinstance(part, torch.Tensor) else _table(part)
    return found if device is None else found.to(device)


def check_whole_ids(index: Index, parts: Sequence[Any], looked_up: Container[int]) -> None:
    """Whether index tensors, which a rank may not have to read, are in range.

    Args:
        parts: of the index, one per item.
        looked_up: dims whose indices are checked where they are looked up.

    Raises:
        IndexError: when they are not.
    """
    for part, item in zip(parts, index.items, strict=True):
        if item.kind == "tensor" and item.dim not in looked_up:
            ids, size = as_ids(part), index.shape[item.dim]
            check_in_range(torch.where(ids < 0, ids + size, ids), size)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(map(str, map(list, shapes)))
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {listed}"
        ) from None


def _meta_indices(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.int64, device="meta")


def _items(index: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Item, ...]:
    parts = [_table(part) if _is_table(part) else part for part in index]
    reads = [dims_read(part) for part in parts]
    left = len(shape) - sum(reads)
    if left < 0:
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    dots = sum(part is Ellipsis for part in parts)
    if dots > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    items: list[Item] = []
    dim = 0
    for where, part in enumerate(parts):
        if part is Ellipsis:
            items += [Item("range", d, range(shape[d]), None) for d in range(dim, dim + left)]
            dim += left
            continue
        items.append(_item(part, dim, shape, where))
        dim += reads[where]
    items += [Item("range", d, range(shape[d]), None) for d in range(dim, len(shape))]
    return tuple(items)


def _is_table(part: Any) -> bool:
    """Whether a part is a list or an array of NumPy: indices that every rank has."""
    if isinstance(part, torch.Tensor):
        return False
    return isinstance(part, (list, tuple, range)) or (hasattr(part, "__array__") and getattr(part, "ndim", 0) > 0)


def _table(part: Any) -> torch.Tensor:
    found = torch.as_tensor(part)
    return found if found.numel() else found.to(torch.bool if found.dtype is torch.bool else torch.int64)


def _is_mask(part: Any) -> bool:
    return part.dtype in (torch.bool, torch.uint8)


def dims_read(part: Any) -> int:
    """How many dims of the tensor a part of an index reads."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return len(part.shape) if isinstance(part, (Ref, torch.Tensor)) and _is_mask(part) else 1


def _item(part: Any, dim: int, shape: tuple[int, ...], where: int) -> Item:
    if part is None:
        return Item("new", dim, None, where)
    if isinstance(part, bool):
        return Item("mask", dim, (), where)
    if isinstance(part, slice):
        if part.step is not None and part.step <= 0:
            raise ValueError("step must be greater than zero")
        return Item("range", dim, range(shape[dim])[part], where)
    if isinstance(part, (Ref, torch.Tensor)):
        ref, sizes = part if isinstance(part, Ref) else None, tuple(part.shape)
        if _is_mask(part):
            _check_mask(sizes, dim, shape)
            return Item("mask", dim, sizes, where, ref)
        if part.dtype.is_floating_point or part.dtype.is_complex:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        return Item("tensor", dim, sizes, where, ref) if sizes else Item("int", dim, None, where, ref)
    if hasattr(part, "__index__"):
        return Item("int", dim, _in_range(part.__index__(), dim, shape[dim]), where)
    raise TypeError(f"a DTensor cannot be indexed with {type(part).__name__} {part!r}")


def _check_mask(sizes: tuple[int, ...], dim: int, shape: tuple[int, ...]) -> None:
    for d, n in enumerate(sizes):
        if n != shape[dim + d]:
            raise IndexError(
                f"the shape of the mask {list(sizes)} at index {d} does not match the shape of the indexed tensor "
                f"{list(shape)} at index {dim + d}"
            )


def _in_range(value: int, dim: int, size: int) -> int:
    """``value`` counted from the front."""
    if not -size <= value < size:
        raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {size}")
    return value % size
