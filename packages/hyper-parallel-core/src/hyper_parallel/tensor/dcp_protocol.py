"""The ``torch.distributed.checkpoint`` protocol: which blocks of a global tensor this rank saves and loads."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hyper_parallel.sharding.shard_ranges import box
from hyper_parallel.tensor.in_place import before_write

if TYPE_CHECKING:
    from hyper_parallel.tensor.dtensor import DTensor


def blocks(tensor: DTensor) -> list[tuple[torch.Size, torch.Size, tuple[slice, ...]]]:
    """(global offsets, sizes, place in the local tensor) of every block that this rank holds.

    A packed shard has several blocks.

    Raises:
        RuntimeError: the tensor is a pending reduction, whose terms belong to no place of a file. (PyTorch's planner
            replaces a ValueError by one about something else.)
    """
    layout = tensor.layout
    if layout.is_partial():
        raise RuntimeError(
            f"a pending reduction can neither be saved nor loaded into: {layout}. Save tensor.reduce_partial(); load "
            "into a tensor whose placements are Shard or Replicate"
        )
    if 0 in tensor.shape:  # an empty tensor is one empty block, so that its name is in the checkpoint
        return [(torch.Size([0] * tensor.ndim), tensor.shape, ())]
    per_dim = []
    for intervals in box(layout, tensor.shape, layout.info.my_coordinate()):
        starts = itertools.accumulate((b - a for a, b in intervals), initial=0)
        per_dim.append([(a, b - a, slice(at, at + b - a)) for (a, b), at in zip(intervals, starts, strict=False)])
    blocks = []
    for choice in itertools.product(*per_dim):
        offsets, sizes = torch.Size(c[0] for c in choice), torch.Size(c[1] for c in choice)
        blocks.append((offsets, sizes, tuple(c[2] for c in choice)))
    return blocks


def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
    """One write item per block."""
    properties = TensorProperties.create_from_tensor(tensor._resolve())
    return [
        WriteItem(
            index=MetadataIndex(fqn, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes), properties=properties, size=tensor.shape
            ),
        )
        for offsets, sizes, _ in blocks(tensor)
    ]


def chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """The blocks that this rank holds; the planner asks for them before it loads into them."""
    before_write(tensor.detach())
    return [ChunkStorageMetadata(offsets=offsets, sizes=sizes) for offsets, sizes, _ in blocks(tensor)]


def tensor_shard(tensor: DTensor, index: Any) -> torch.Tensor:
    """The part of the local tensor that is the block at ``index.offset``; writing it writes the tensor."""
    for offsets, _, place in blocks(tensor):
        if index.offset is None or tuple(index.offset) == tuple(offsets):
            return tensor._resolve().detach()[place]
    raise ValueError(f"{index.fqn}: this rank holds no block at {index.offset} of {tensor.layout}")
