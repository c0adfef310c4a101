"""PositionwiseParallel: modules that see one position at a time, on plain tensors."""

import pytest
import torch
from torch import nn
from tp_models import check_gradients, hidden, mesh, twins

from hyper_parallel import CommTrace, PositionwiseParallel, Replicate, Shard, distribute_tensor


class Streams(nn.Module):
    """Joins two streams of features, and says how."""

    def __init__(self):
        super().__init__()
        self.mix, self.base = nn.Linear(8, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        assert type(x) is torch.Tensor or x.shape[1] == 1
        how = (self.mix(x.flatten(2)) + self.base).softmax(-1)
        return (how.unsqueeze(-1) * x).sum(2), how


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [8, 7, 1], ids=["even", "uneven", "some ranks without a position"])
@pytest.mark.parametrize("layout", [Shard(1), Replicate()], ids=str)
def test_values_and_gradients_of_one_device(layout, length):
    model, twin = twins(Streams)
    PositionwiseParallel(layout=layout).apply(model, mesh(4))
    x = hidden(3, length, 2, 4)
    spread = distribute_tensor(x, mesh(4), [layout]).requires_grad_()
    x.requires_grad_()
    outputs, wanted = model(spread), twin(x)
    for got, want in zip(outputs, wanted, strict=True):
        assert got.placements == (layout,)
        torch.testing.assert_close(got.full_tensor(), want)
    with CommTrace() as trace:
        (outputs[0].pow(2).sum() + outputs[1].sin().sum()).backward()
    (wanted[0].pow(2).sum() + wanted[1].sin().sum()).backward()
    torch.testing.assert_close(spread.grad.full_tensor(), x.grad)
    check_gradients(model, twin)
    if length > 1:
        assert trace.counts.get("all_reduce", 0) == (1 if layout == Shard(1) else 0)
