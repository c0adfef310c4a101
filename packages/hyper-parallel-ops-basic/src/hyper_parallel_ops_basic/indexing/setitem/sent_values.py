"""Values, and the index tensors that say where they go, sharded by the mesh axes of the dimension that is written.

The ranks tell each other sharded indices (one all-gather each); then the values that another rank holds the places of
travel there (one all-to-all).
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel import Layout, Shard
from hyper_parallel.rules import Call, S
from hyper_parallel_ops_basic.indexing.exchange import IndexExchange
from hyper_parallel_ops_basic.indexing.index import Index, Item, as_ids
from hyper_parallel_ops_basic.indexing.setitem.local_write import Value


class Travelling:
    """How they travel.

    Args:
        index: with index tensors and no mask.
        layout: of the tensor that is written.
        item: the index tensor of the sharded dim.
        place: among the dims that index tensors broadcast to, that which is sharded.
        told: the index tensors that are sharded along it.
        brings: whether the values are.
    """

    def __init__(self, index: Index, layout: Layout, item: Item, place: int, told: list[Item], brings: bool) -> None:
        assert index.broadcast is not None
        self.index, self.item, self.place, self.told, self.brings = index, item, place, told, brings
        self.axes = layout.shard_order[item.dim]
        spread = layout.replicated(len(index.broadcast))
        for axis in self.axes:
            spread = spread.with_placements({axis: S(place)})
        self.exchange = IndexExchange(layout, index.shape, item.dim, spread, index.broadcast)

    @property
    def at(self) -> int:
        """The dim of the result along which index tensors and values are sharded."""
        return self.index.gathered[self.place]

    def arrived(self, parts: list[Any], value: Value, local: Any) -> Any:
        """Leaves, in ``parts``, the indices that may fall into this rank's piece; returns the values for them."""
        wholes: dict[int, torch.Tensor] = {}
        for number, item in enumerate(self.index.items):
            if item.kind == "tensor":
                ids, size = as_ids(parts[number], torch.device("cpu")), self.index.shape[item.dim]
                ids = torch.where(ids < 0, ids + size, ids)
                wholes[number] = self.exchange.told(ids, size, self.place) if item in self.told else ids
        needed = self.exchange.needed(
            next(whole for number, whole in wholes.items() if self.index.items[number] is self.item),
            own_place(self.index, self.item, self.place),
        )
        mine = needed[self.exchange.rank]
        for number, whole in wholes.items():
            own = own_place(self.index, self.index.items[number], self.place)
            is_along = own >= 0 and whole.shape[own] != 1
            parts[number] = whole.index_select(own, mine) if is_along else whole
        own_dim = value.own_dim(self.at)
        if own_dim is None or value.shape[own_dim] == 1:
            return local
        if self.brings:
            return self.exchange.bring(local, own_dim, self.place, needed)
        return local.index_select(own_dim, mine.to(local.device))


def own_place(index: Index, item: Item, place: int) -> int:
    """The dim of an index tensor that is number ``place`` of those that all broadcast to; negative without one."""
    return place - len(index.gathered) + len(item.value)


def travelling_with(call: Call, index: Index, target: Layout, value: Value) -> Travelling | None:
    """How index tensors and values travel, where they are sharded by the mesh axes of the dim that one index means."""
    for item in index.tensors():
        axes = target.shard_order[item.dim]
        for place, size in enumerate(index.broadcast or ()):  # with masks nothing travels
            own = own_place(index, item, place)
            if not axes or own < 0 or item.value[own] != size or size == 1:
                continue
            alike = [(i, i.ref) for i in index.tensors() if i.value == index.broadcast]
            told = [i for i, ref in alike if ref and _sharded_by(call.inputs[ref.index].layout, place, axes)]
            dim = value.own_dim(index.gathered[place])
            brings = dim is not None and value.shape[dim] == size and _sharded_by(value.given, dim, axes)
            if told or brings:
                return Travelling(index, target, item, place, told, brings)
    return None


def _sharded_by(layout: Layout | None, dim: int, axes: tuple[int, ...]) -> bool:
    """Whether a dim is sharded by exactly these mesh axes, plainly."""
    return (
        layout is not None
        and layout.shard_order[dim] == axes
        and all(type(layout.placements[a]) is Shard for a in axes)
    )
