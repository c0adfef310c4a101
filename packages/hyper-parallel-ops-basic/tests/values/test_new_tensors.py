"""``empty_like`` and ``new_empty`` of a pending tensor, ``new_empty_strided``: as PyTorch's DTensor has them."""

import pytest
import torch

from hyper_parallel import CommTrace, Partial, Replicate, Shard
from hyper_parallel.testing import make, mesh_of

FORMS = {
    "sharded": [Shard(0), Replicate()],
    "both axes": [Shard(1), Shard(0)],
    "pending": [Partial(), Shard(1)],
    "pending max": [Partial("max"), Replicate()],
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", FORMS)
def test_memory_as_it_comes_lies_as_the_model(form):
    value = torch.rand(5, 3, dtype=torch.float64)
    x = make(value, mesh_of((2, 2)), FORMS[form])
    for new in (
        torch.empty_like(x),
        torch.empty_like(x, layout=torch.strided),
        x.new_empty(5, 3),
        x.new_empty((5, 3), layout=torch.strided),
        x.new_empty_strided((5, 3), (3, 1)),
    ):
        assert (new.placements, new.dtype, new.stride()) == (x.placements, x.dtype, (3, 1))
        with CommTrace() as trace:
            new.copy_(x)
        assert not trace.events
        torch.testing.assert_close(new.full_tensor(), value)


@pytest.mark.ranks(4)
def test_values_of_a_pending_model_are_whole():
    x = make(torch.rand(5, 3), mesh_of((4,)), [Partial()])
    for new, want in ((torch.ones_like(x), 1.0), (x.new_full((5, 3), 2.0), 2.0), (x.new_zeros(5, 3), 0.0)):
        assert new.placements == (Replicate(),)
        assert torch.equal(new.full_tensor(), torch.full((5, 3), want))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stride", [(3, 1), (1, 5)], ids=str)
def test_a_dense_stride_is_that_of_the_global_tensor(stride):
    x = make(torch.rand(5, 3), mesh_of((4,)), [Shard(0)])
    new = x.new_empty_strided((5, 3), stride, dtype=torch.float64)
    assert (new.placements, new.stride(), new.dtype) == ((Shard(0),), stride, torch.float64)
    new.fill_(2)
    assert torch.equal(new.full_tensor(), torch.full((5, 3), 2.0, dtype=torch.float64))


@pytest.mark.ranks(4)
def test_other_sizes_and_strides_with_gaps_are_whole():
    x = make(torch.rand(5, 3), mesh_of((4,)), [Shard(0)])
    for size, stride in (((4, 2, 3), (6, 3, 1)), ((5, 3), (6, 2)), ((5, 3), (0, 1))):
        new = x.new_empty_strided(size, stride)
        assert (new.placements, tuple(new.shape), new.stride()) == ((Replicate(),), size, stride)
        assert new.to_local().stride() == stride


@pytest.mark.ranks(4)
def test_operators_that_draw_beside_a_pending_tensor_reduce_no_number_that_they_drew():
    x = make(torch.rand(5, 3), mesh_of((4,)), [Partial()])
    torch.normal(x.clone(), 1.0)  # the first draw on a mesh compares the ranks' seeds
    with CommTrace() as trace:
        out = torch.nn.functional.rrelu(x, training=True)
    assert out.placements == (Replicate(),)
    assert trace.counts == {"all_reduce": 1}  # the input
    with CommTrace() as trace:
        out = torch.normal(x, 1.0)
    assert out.placements == (Replicate(),)
    assert trace.counts == {"all_reduce": 1}
