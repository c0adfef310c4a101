"""as_strided: exact where a piece has the memory of the whole, else refused."""

import pytest
import torch

from hyper_parallel import Shard
from hyper_parallel.errors import RedistributionError
from hyper_parallel.testing import OpConformance, make, mesh_of, sample, tensor


class TestAsStrided(OpConformance):
    op = torch.as_strided
    meshes = ((4,), (2, 2))
    samples = (
        sample(tensor(5, 6, 2), (5, 3, 2, 2), (12, 4, 2, 1)).options(name="overlapping_chunks_of_a_batch"),
        sample(tensor(5, 6), (6, 5), (1, 6)).options(name="transposed"),
    )


@pytest.mark.ranks(4)
def test_a_write_into_the_view_reaches_the_tensor():
    x = make(torch.zeros(6, 4), mesh_of((4,)), [Shard(0)])
    x.as_strided((6, 2), (4, 2)).fill_(1)
    assert x.full_tensor().tolist() == [[1, 0, 1, 0]] * 6


@pytest.mark.ranks(4)
def test_what_strides_cut_anew_is_refused():
    x = make(torch.zeros(6, 4), mesh_of((4,)), [Shard(0)])
    for size, stride in (((24,), (1,)), ((6, 5), (4, 1)), ((3, 8), (8, 1))):
        with pytest.raises(RedistributionError, match="as_strided"):
            x.as_strided(size, stride)
    with pytest.raises(ValueError, match="storage_offset"):
        x.as_strided((6, 2), (4, 1), 2)
