"""``shard_batch``: this rank's part of a global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hyper_parallel import DeviceMesh, DTensor, Replicate, Shard
from hyper_parallel.rules import check_same_tensors, chunk_bounds, mesh_info
from hyper_parallel_tp.parallel_dims import ParallelDims

__all__ = ["data_mesh", "shard_batch"]

_IMAGES = (("pixel_values", "image_grid_thw", 1), ("pixel_values_videos", "video_grid_thw", 2))
"""Patches of all pictures one after the other, how many patches each has (time, height, width), and what
``mm_token_type_ids`` says of tokens in whose place they stand."""


def shard_batch(
    batch: Mapping[str, Any], dims: ParallelDims, *, as_dtensor: bool = False, check: bool = True
) -> dict[str, Any]:
    """This rank's part of a global batch: its rows, split over the data ranks as ``torch.chunk`` does.

    Every rank passes the whole batch; ranks that differ in tp only get the same part.

    Args:
        batch: tensors with one row per sample along their first dim, as a tokenizer or a collator gives them. Pictures
            go with the sample that they stand in (``pixel_values`` with ``image_grid_thw``, the videos' alike), which
            ``mm_token_type_ids`` tells. Values that are no tensors, and tensors without dims, are passed on.
        dims: which ranks have which data.
        as_dtensor: give DTensors over the data axes, where there are any, of the shape of the whole batch: losses,
            router statistics and whatever else is computed over a batch are those of the whole batch. Otherwise plain
            tensors, of which the model sees this rank's only.
        check: compare the batch over all ranks before it is cut: one all-reduce of 16 bytes.

    Raises:
        ValueError: ranks have different batches, on every rank; tensors have different numbers of rows; there are
            fewer rows than data ranks (plain tensors); pictures without what tells which sample they are of.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    pictures = {name for patches, sizes, _ in _IMAGES for name in (patches, sizes)}
    rows = {name: len(value) for name, value in tensors.items() if name not in pictures}
    if len(set(rows.values())) != 1:
        raise ValueError(f"shard_batch: tensors of a batch have the same number of rows, got {rows}")
    count = next(iter(rows.values()))
    mesh = dims.get_mesh("batch")
    info = mesh_info(mesh)
    if check:
        everyone = mesh_info(dims.get_mesh(("batch", "cp", "tp")))
        check_same_tensors(everyone, "the batch given to shard_batch", tensors)
    laid_out_over = data_mesh(dims)
    if laid_out_over is None:
        return dict(batch)
    if as_dtensor:
        return {**batch, **_as_dtensors(tensors, pictures, laid_out_over)}
    ranks = info.shape[0]
    first, last = chunk_bounds(count, ranks, info.my_coordinate()[0])
    if count < ranks:
        raise ValueError(
            f"shard_batch: {count} rows for {ranks} data ranks; give at least one row each, or as_dtensor=True, where "
            "a rank may have none"
        )
    parts = {name: value[first:last] for name, value in tensors.items() if name not in pictures}
    for patches, sizes, kind in _IMAGES:
        if sizes in tensors:
            parts.update(_pictures_of(tensors, patches, sizes, kind, first, last))
    return {**batch, **parts}


def data_mesh(dims: ParallelDims) -> DeviceMesh | None:
    """The mesh of batches that are DTensors: data axes, and tp where there is one; None for one data rank."""
    if dims.sizes()["batch"] == 1:
        return None
    return dims.get_mesh(("dp_replicate", "fsdp") if dims.tp == 1 else ("dp_replicate", "fsdp", "tp"))


def _as_dtensors(tensors: Mapping[str, torch.Tensor], pictures: set[str], mesh: DeviceMesh) -> dict[str, Any]:
    whole = [Replicate()] * mesh.ndim
    rows = [Shard(0), Shard(0), *whole[2:]]
    return {
        name: DTensor.from_local(value, mesh, whole).redistribute(placements=whole if name in pictures else rows)
        for name, value in tensors.items()
    }


def _pictures_of(
    tensors: Mapping[str, torch.Tensor], patches: str, sizes: str, kind: int, first: int, last: int
) -> dict[str, torch.Tensor]:
    """The pictures in some rows, which follow each other as they do in the text."""
    kinds = tensors.get("mm_token_type_ids")
    if kinds is None:
        raise ValueError(
            f"shard_batch: the batch has {patches} and no mm_token_type_ids, which say in which sample a picture is; "
            "the processors of transformers give them"
        )
    per_row = (kinds == kind).sum(dim=1).cumsum(0)
    counts = tensors[sizes].prod(dim=1).cumsum(0)
    if not len(counts):
        return {}
    # Each token of a picture stands for as many patches as any other.
    ends = per_row * counts[-1] // per_row[-1].clamp(min=1)
    start = int(ends[first - 1]) if first else 0
    stop = int(ends[last - 1])
    inside = (counts > start) & (counts <= stop)
    return {patches: tensors[patches][start:stop], sizes: tensors[sizes][inside]}
