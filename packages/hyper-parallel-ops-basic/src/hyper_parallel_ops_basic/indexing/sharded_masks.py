"""Masks, alone or beside other index tensors, as in ``x[mask, ids]``, where dimensions that they read are sharded.

Beside others a mask counts as the index tensors that ``nonzero`` gives of it, its columns. One mask may be sharded as
the dimensions that it reads: of that each rank has the columns of its own part, and takes of the other index tensors
the elements that go with them. A second one has to be whole: only whole masks tell which of their elements go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Shard
from hyper_parallel.rules import NOT_VARYING, Call, OverAxes, local_part, refuse, transition
from hyper_parallel_ops_basic.indexing.index import Index, Item, as_ids
from hyper_parallel_ops_basic.indexing.mask_positions import Picked, of_dims


class ShardedMask:
    """A mask of which each rank needs its own part, as it holds a part of the tensor of ``shape``."""

    def __init__(self, item: Item, target: Layout, shape: tuple[int, ...]) -> None:
        self.item, self.layout = item, of_dims(target, item.dims)
        self._sizes = tuple(shape[d] for d in item.dims)

    def here(self, given: Sequence[Any], device: torch.device) -> torch.Tensor:
        """This rank's part."""
        chosen = _as_mask(given[self.item.where or 0], device)
        # A list is whole on every rank.
        return chosen if self.item.ref is not None else local_part(chosen, self.layout, self._sizes)

    def picked(self, here: torch.Tensor) -> Picked:
        """What the whole mask picks; 1 or 2 all-gathers."""
        return Picked(here, self.layout, self._sizes)


class Beside:
    """What a rank has for its index tensors where masks are among them.

    Args:
        index: with the masks.
        mask: that which is on sharded dims, if there is one; others are whole.
        spread: the layouts, by their place in the index tuple, of the index tensors that lie as what the mask picks
            (in equal chunks over the ranks); every rank has all of the others.

    Attributes:
        index: with the masks' columns in their place.
    """

    def __init__(self, index: Index, mask: Item | None, spread: dict[int, Layout]) -> None:
        self.mask, self.masks, self.tensors, self.spread = mask, index.masks(), index.tensors(), spread
        self.index = index.with_columns(mask)

    def whole_parts(self, given: Sequence[Any], device: torch.device) -> list[Any]:
        """The parts of the index with the columns of the masks behind them, where no mask is on sharded dims.

        Raises:
            IndexError: when the masks do not pick as many elements as there are indices.
        """
        columns = [_as_mask(given[mask.where or 0], device).nonzero() for mask in self.masks]
        _check_counts([*map(len, columns), *(item.value[-1] for item in self.tensors)])
        return [*given, *(column for found in columns for column in found.unbind(1))]

    def parts(self, given: Sequence[Any], here: torch.Tensor, picked: Picked) -> tuple[list[Any], bool]:
        """The parts of the index for this rank's elements, with the columns of the masks behind them.

        Returns:
            also whether all this is for one picked element, which goes with any number of indices; on ranks that do not
            hold it, its place is behind the end.

        Raises:
            IndexError: when there are more or fewer indices than the mask picks; on all ranks alike.
        """
        parts, device = list(given), here.device
        columns = [
            here.nonzero() if mask is self.mask else _as_mask(given[mask.where or 0], device).nonzero()
            for mask in self.masks
        ]
        sizes = [item.value[-1] for item in self.tensors]
        sizes += [len(c) for c, mask in zip(columns, self.masks, strict=True) if mask is not self.mask]
        _check_counts([picked.total, *sizes])
        is_one = picked.total == 1 and any(n != 1 for n in sizes)
        for item in self.tensors:
            at = item.where or 0
            if item.value[-1] != 1:
                parts[at] = self._of_this_rank(as_ids(parts[at], device), at, item.value, picked, is_one)
        for mask, found in zip(self.masks, columns, strict=True):
            if mask is self.mask:
                found = found.new_tensor([here.shape]) if is_one and not len(found) else found
            elif mask.value and len(found) != 1 and not is_one:
                found = picked.of_this_rank(found, 0, False)
            parts += found.unbind(1)
        return parts, is_one

    def _of_this_rank(
        self, ids: torch.Tensor, at: int, shape: tuple[int, ...], picked: Picked, is_one: bool
    ) -> torch.Tensor:
        if not is_one:
            return picked.of_this_rank(ids, -1, at in self.spread)
        if at not in self.spread:
            return ids
        layout = self.spread[at]
        return transition(ids, (layout, NOT_VARYING), (layout.replicated(), NOT_VARYING), shape)


def _check_counts(counts: Sequence[int]) -> None:
    if len({n for n in counts if n != 1}) > 1:
        listed = ", ".join(map(str, counts))
        raise IndexError(f"shape mismatch: masks and index tensors are for different numbers of elements: {listed}")


def _as_mask(part: Any, device: torch.device) -> torch.Tensor:
    """Bools, of what may be a list or of bytes."""
    return torch.as_tensor(part, device=device).to(torch.bool)


def leading(call: Call, index: Index) -> Item | None:
    """The mask that may be sharded as the dims that it reads: the first that is sharded, or else the first."""
    masks = index.masks()
    sharded = [m for m in masks if m.ref is not None and any(call.inputs[m.ref.index].layout.shard_order)]
    return next(iter([*sharded, *masks]), None)


def the_sharded_mask(mask: Item | None, target: Layout, shape: tuple[int, ...]) -> ShardedMask | None:
    """The leading mask, where dims that it reads are sharded."""
    is_sharded = mask is not None and any(target.shard_order[d] for d in mask.dims)
    return ShardedMask(mask, target, shape) if mask is not None and is_sharded else None


def axes_of(*layouts: Layout) -> set[int]:
    """The mesh axes that share out tensors with these layouts."""
    return {a for layout in layouts for a in OverAxes(layout, range(layout.ndim)).axes}


def lying_as_picked(call: Call, index: Index, axes: set[int]) -> list[Item]:
    """The index tensors that lie as what a mask picks that is sharded by these mesh axes."""
    tensors = [(item, call.inputs[item.ref.index].layout) for item in index.tensors() if item.ref is not None]
    return [item for item, layout in tensors if item.value[-1] != 1 and in_chunks(layout, layout.ndim - 1, axes)]


def read_together(call: Call, index: Index, mask: Item) -> list[Item]:
    """The index tensors that lie as what the mask will pick, once tensor and mask are sharded by the same axes."""
    layouts = [of_dims(call.inputs[0].layout, mask.dims)]
    if mask.ref is not None:
        layouts.append(call.inputs[mask.ref.index].layout)
    return lying_as_picked(call, index, axes_of(*layouts))


def in_chunks(layout: Layout, dim: int, axes: set[int]) -> bool:
    """Whether a tensor lies along a dim as :meth:`Picked.layout_of` says of what these mesh axes shard."""
    order, over = ([a for a in some if layout.mesh_shape[a] > 1] for some in (layout.shard_order[dim], sorted(axes)))
    return bool(over) and order == over and all(type(layout.placements[a]) is Shard for a in order)


def beside_of(call: Call, index: Index, mask: ShardedMask | None, targets: Sequence[Layout]) -> Beside | None:
    """What goes with the index tensors beside masks; None where there is no mask, or nothing beside it.

    Args:
        mask: that which is on sharded dims.
        targets: the layouts that the inputs will have.

    Raises:
        RedistributionError: when one of them lies in some other way than what the mask picks.
    """
    if not index.has_mask or len(index.masks()) + len(index.tensors()) == 1:
        return None
    axes = set() if mask is None else axes_of(mask.layout)
    spread: dict[int, Layout] = {}
    for item in index.tensors():
        layout = None if item.ref is None else targets[item.ref.index]
        if layout is None or not any(layout.shard_order):
            continue
        if not in_chunks(layout, layout.ndim - 1, axes):
            raise refuse(
                call,
                f"an index tensor beside a mask is sharded as {layout}, otherwise than what the mask picks",
                "redistribute it to Replicate",
            )
        spread[item.where or 0] = layout
    return Beside(index, None if mask is None else mask.item, spread)
