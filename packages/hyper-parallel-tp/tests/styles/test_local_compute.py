"""``LocalCompute``: a module's own code on this rank's pieces of its parameters and inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from tp_models import check_gradients, hidden, mesh, twins, whole

from hyper_parallel import (
    CommTrace,
    DTensor,
    LocalCompute,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Experts(nn.Module):
    """Each expert has its own slice of one parameter; the code reads the parameters' shapes."""

    def __init__(self, experts=3, inner=6):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, inner, 8))
        self.down = nn.Parameter(torch.zeros(experts, 8, inner))
        self.scale = nn.Parameter(torch.zeros(experts))

    def forward(self, x, weights):
        assert type(x) is type(weights) is torch.Tensor or type(self.up) is nn.Parameter
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            inner = torch.relu(x @ self.up[e].T).reshape(*x.shape[:-1], self.down.shape[2])
            out = out + self.scale[e] * weights[..., e, None] * (inner @ self.down[e].T)
        return out


@pytest.mark.ranks(2)
def test_experts_compute_on_this_ranks_pieces():
    model, twin = twins(Experts)
    parallelize_module(model, mesh(), LocalCompute(parameters={"up": Shard(1), "down": Shard(2)}))
    x, w = distribute_tensor(hidden(), mesh(), [R]).requires_grad_(), hidden(2, 4, 3).requires_grad_()
    y, v = hidden().requires_grad_(), hidden(2, 4, 3).requires_grad_()
    out, want = model(x, weights=w), twin(y, v)
    assert isinstance(model.up, DTensor)
    torch.testing.assert_close(out.full_tensor(), want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    torch.testing.assert_close(w.grad, v.grad)
    check_gradients(model, twin)
    with pytest.raises(RuntimeError, match="shape"):
        model(hidden(2, 4, 7), hidden(2, 4, 3))
    assert isinstance(model.up, DTensor)  # also after an error


@dataclasses.dataclass
class Tokens:
    """What a module takes and returns."""

    hidden: torch.Tensor
    count: int = 3


class InStructures(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 6))

    def forward(self, tokens, *, more):
        y = torch.relu((tokens.hidden + more["offset"]) @ self.up.T) @ self.down.T
        return Tokens(y), {"twice": [2 * y]}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [None, R, S1], ids=["plain", "R", "S1"])
def test_tensors_inside_of_structures(placement):
    """They enter whole and leave as sums, as those do that are inputs and outputs themselves."""
    model, twin = twins(InStructures)
    parallelize_module(model, mesh(), LocalCompute(parameters={"up": S0, "down": S1}))
    x = hidden() if placement is None else distribute_tensor(hidden(), mesh(), [placement])
    x, y, offset = x.requires_grad_(), hidden().requires_grad_(), hidden(8)
    out, more = model(Tokens(x), more={"offset": offset})
    want, want_more = twin(Tokens(y), more={"offset": offset})
    torch.testing.assert_close(out.hidden.full_tensor(), want.hidden)
    torch.testing.assert_close(more["twice"][0].full_tensor(), want_more["twice"][0])
    (out.hidden.pow(2).sum() + more["twice"][0].sum()).backward()
    (want.hidden.pow(2).sum() + want_more["twice"][0].sum()).backward()
    torch.testing.assert_close(whole(x.grad), y.grad)
    check_gradients(model, twin)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", [R, S0, S1], ids=["R", "S0", "S1"])
def test_experts_compute_with_their_part_of_a_batch_over_data_ranks(rows):
    """Of 3 rows, or 4 positions, over dp; parameters on the whole mesh, as fully_shard hands them out."""
    full = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, twin = twins(Experts)
    parallelize_module(model, full["tp"], LocalCompute(parameters={"up": Shard(1), "down": Shard(2)}))
    x, w = (distribute_tensor(hidden(3, 4, n), full, [rows, R]).requires_grad_() for n in (8, 3))
    if rows != R:
        with pytest.raises(ValueError, match=r"Experts got Layout\(tp=2.*beside Layout\(dp=2xtp=2.*fully_shard"):
            model(x, w)
    for name, parameter in list(model.named_parameters()):
        local = parameter.detach().to_local()
        laid_out = DTensor.from_local(local, full, [R, *parameter.placements], shape=parameter.shape)
        setattr(model, name, nn.Parameter(laid_out))
    y, v = hidden(3, 4, 8).requires_grad_(), hidden(3, 4, 3).requires_grad_()
    with CommTrace() as trace:
        out, want = model(x, w), twin(y, v)
    assert out.placements == (rows, R)
    assert trace.counts == {"all_reduce": 1}  # over tp alone
    torch.testing.assert_close(out.full_tensor(), want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    torch.testing.assert_close(w.grad.full_tensor(), v.grad)
    check_gradients(model, twin)
    if rows != R:
        with pytest.raises(ValueError, match="along the dimension of the first that is"):
            model(x, w.redistribute(full, [S1 if rows == S0 else S0, R]))
