"""Sequences of different lengths: padded to one batch, and folded by segments."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from hyper_parallel import CommTrace, Replicate, Shard, distribute_tensor, redistribute_policy
from hyper_parallel.testing import OpConformance, mesh_of, sample, tensor


class Few(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 10


class TestPadSequence(Few):
    op = pad_sequence
    samples = (
        sample([tensor(5, 2), tensor(3, 2), tensor(1, 2)], batch_first=True),
        sample([tensor(4), tensor(2)], padding_value=-1.0, padding_side="left"),
    )


OFFSETS = torch.tensor([[0, 0, 2, 3], [0, 1, 1, 3], [0, 0, 3, 3], [1, 1, 2, 2]])


class TestSegmentReduce(Few):
    op = torch.segment_reduce
    samples = (
        sample(tensor(5, 6), "sum", lengths=torch.tensor([2, 0, 3])),
        sample(tensor(5, 3, 2), "mean", lengths=torch.tensor([[1, 2]] * 5), axis=1),
        sample(tensor(5, 3), "sum", lengths=torch.tensor([[1, 2]] * 5), axis=-1),
        sample(tensor(5, 6), "max", offsets=torch.tensor([0, 2, 5])),
        *(sample(tensor(7, 2), reduce, lengths=torch.tensor([1, 0, 4, 2])) for reduce in ("max", "prod")),
        *(sample(tensor(4, 3), reduce, offsets=OFFSETS, initial=0.5, axis=1) for reduce in ("prod", "mean")),
        sample(tensor(7, 2), "sum", lengths=torch.tensor([1, 3]), unsafe=True).options(name="not all rows"),
    )


SUMMED, TIES = ({}, {}), ({"all_reduce": 1}, {"all_reduce": 1})


@pytest.mark.ranks(4)
@pytest.mark.parametrize("initial", [None, 3.0])
@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "max", "min"])
def test_segments_of_sharded_rows(reduce, initial):
    """Equal elements, zeros and a NaN meet in segments and lie on several ranks; some segments are empty."""
    rows = [[3, 3, 0], [1, 0, 2], [3, 0, 2], [1, 2, 2], [3, 2, 1], [2, 2, 0], [1, torch.nan, 0], [3, 0, 0], [3, 3, 5]]
    plain = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    how = {"lengths": torch.tensor([0, 5, 0, 4]), "initial": initial}
    wanted = torch.segment_reduce(plain, reduce, **how)
    weights = torch.tensor([[1.0, 2, -1], [3, -5, 0.5], [1, 1, 1], [-2, 7, 3]], dtype=torch.float64)
    wanted.backward(weights)
    mesh = mesh_of((4,))
    x = distribute_tensor(plain.detach(), mesh, [Shard(0)]).requires_grad_()
    gradient = distribute_tensor(weights, mesh, [Replicate()])
    how["lengths"] = distribute_tensor(how["lengths"], mesh, [Replicate()])
    with redistribute_policy("strict"), CommTrace() as forward:
        out = torch.segment_reduce(x, reduce, **how)
    with CommTrace() as backward:
        out.backward(gradient)
    costs = {"prod": ({"all_gather": 1}, {}), "max": TIES, "min": TIES}
    assert (dict(forward.counts), dict(backward.counts)) == costs.get(reduce, SUMMED)
    torch.testing.assert_close(out.full_tensor(), wanted, equal_nan=True)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, equal_nan=True)
    with pytest.raises(RuntimeError, match="Expected all rows of lengths along axis to sum to"):
        torch.segment_reduce(x, reduce, lengths=how["lengths"] + 1)
