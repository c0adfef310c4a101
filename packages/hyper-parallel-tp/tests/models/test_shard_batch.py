"""``shard_batch``: rows for data ranks, pictures with the rows that they are in."""

import pytest
import torch

from hyper_parallel import DTensor, ParallelDims, shard_batch


@pytest.mark.ranks(4)
def test_rows_go_to_data_ranks():
    dims = ParallelDims(tp=2)
    rank = torch.distributed.get_rank() // 2
    batch = {"input_ids": torch.arange(10).view(5, 2), "mask": torch.ones(5), "scale": torch.tensor(3.0), "name": "b"}
    part = shard_batch(batch, dims)
    assert part["input_ids"].tolist() == batch["input_ids"][3 * rank : 3 * rank + 3].tolist()
    assert len(part["mask"]) == len(part["input_ids"])
    assert (part["scale"], part["name"]) == (3.0, "b")
    laid_out = shard_batch(batch, dims, as_dtensor=True)["input_ids"]
    assert isinstance(laid_out, DTensor)
    assert laid_out.shape == (5, 2)
    assert laid_out.to_local().tolist() == part["input_ids"].tolist()


@pytest.mark.ranks(2)
def test_pictures_go_with_their_rows():
    """Two pictures of 4 and 8 patches in the first row, none in the second, one of 4 in the third; 4 patches are a
    token."""
    kinds = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    sizes = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])
    patches = torch.arange(16.0).view(16, 1)
    batch = {"input_ids": kinds * 7, "mm_token_type_ids": kinds, "pixel_values": patches, "image_grid_thw": sizes}
    part = shard_batch(batch, ParallelDims())
    first = torch.distributed.get_rank() == 0
    assert part["pixel_values"].flatten().tolist() == list(range(12) if first else range(12, 16))
    assert part["image_grid_thw"].tolist() == sizes[:2].tolist() if first else sizes[2:].tolist()
    with pytest.raises(ValueError, match="no mm_token_type_ids"):
        shard_batch({name: value for name, value in batch.items() if name != "mm_token_type_ids"}, ParallelDims())


@pytest.mark.ranks(2)
def test_faulty_batches_are_refused_on_all_ranks():
    dims, rank = ParallelDims(), torch.distributed.get_rank()
    with pytest.raises(ValueError, match="the batch given to shard_batch differs by rank"):
        shard_batch({"x": torch.full((4, 2), rank)}, dims)
    with pytest.raises(ValueError, match=r"same number of rows, got {'x': 4, 'y': 3}"):
        shard_batch({"x": torch.zeros(4), "y": torch.zeros(3)}, dims)
    with pytest.raises(ValueError, match="1 rows for 2 data ranks"):
        shard_batch({"x": torch.zeros(1)}, dims)
