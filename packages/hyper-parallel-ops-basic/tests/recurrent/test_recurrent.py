"""Recurrent networks: batches may be sharded, with states, dropout and gradients as on one device."""

import copy

import pytest
import torch
from torch import nn

from hyper_parallel import (
    CommTrace,
    Layout,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    manual_seed,
    shard_module,
)
from hyper_parallel.errors import RedistributionError
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.placing import mesh_of


class Few(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 6


def lstm(x, h, c, w_ih, w_hh, b_ih, b_hh):
    return torch.lstm(x, (h, c), (w_ih, w_hh, b_ih, b_hh), True, 1, 0.0, True, False, False)


class TestLstm(Few):
    op = lstm
    samples = (
        sample(tensor(5, 3, 4), tensor(1, 3, 2), tensor(1, 3, 2), tensor(8, 4), tensor(8, 2), tensor(8), tensor(8)),
    )


def gru(x, h, *weights):
    return torch.gru(x, h, weights, False, 1, 0.0, False, True, True)


class TestBidirectionalGruOfBatchesFirst(Few):
    op = gru
    samples = (sample(tensor(5, 3, 4), tensor(2, 5, 2), tensor(6, 4), tensor(6, 2), tensor(6, 4), tensor(6, 2)),)


def rnn(x, h, *weights):
    first = torch.rnn_tanh(x, h, weights, False, 2, 0.0, True, False, False)
    return torch.rnn_relu(first[0], first[1], (weights[2], *weights[1:]), False, 2, 0.0, True, False, False)


class TestRnn(Few):
    op = rnn
    samples = (sample(tensor(2, 3, 4), tensor(2, 3, 2), tensor(2, 4), tensor(2, 2), tensor(2, 2), tensor(2, 2)),)


KINDS = {
    "lstm": lambda: nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True),
    "lstm with dropout": lambda: nn.LSTM(4, 3, 3, batch_first=True, dropout=0.4),
    "lstm with dropout, steps first": lambda: nn.LSTM(4, 3, 2, dropout=0.4, bidirectional=True),
    "lstm with projections": lambda: nn.LSTM(4, 3, 2, batch_first=True, proj_size=2),
    "gru with dropout": lambda: nn.GRU(4, 3, 2, batch_first=True, dropout=0.4),
    "rnn": lambda: nn.RNN(4, 3, batch_first=True),
    "relu rnn": lambda: nn.RNN(4, 3, 2, nonlinearity="relu", batch_first=True),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_trains_as_on_one_device(kind, dtype):
    torch.manual_seed(0)
    plain = KINDS[kind]().to(dtype)
    batch = 0 if plain.batch_first else 1
    mesh = mesh_of((2, 2))
    for placements in ([Shard(batch), Replicate()], [Shard(batch), Shard(batch)], [Replicate(), Replicate()]):
        mine = copy.deepcopy(plain)
        for name, parameter in list(mine.named_parameters()):
            setattr(mine, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate(), Replicate()])))
        x = torch.randn(3, 5, 4, dtype=dtype)
        given = distribute_tensor(x, mesh, placements).requires_grad_()
        plain.zero_grad()
        want_of = x.clone().requires_grad_()
        manual_seed(3)
        want, want_states = plain(want_of)
        manual_seed(3)
        with implicit_replication(), CommTrace() as trace:
            out, states = mine(given)
        assert trace.counts == ({"all_reduce": 1} if "dropout" in kind else {}), "the ranks' seeds are compared"
        assert out.placements == tuple(placements)
        torch.testing.assert_close(out.full_tensor(), want)
        for state, wanted in zip(flat(states), flat(want_states), strict=True):
            torch.testing.assert_close(state.full_tensor(), wanted)
        want.square().sum().backward()
        out.square().sum().backward()
        torch.testing.assert_close(given.grad.full_tensor(), want_of.grad)
        for name, parameter in mine.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), getattr(plain, name).grad)


def flat(states):
    return states if isinstance(states, tuple) else (states,)


@pytest.mark.ranks(4)
def test_shard_module_reaches_the_weights_that_the_network_keeps_in_a_list():
    torch.manual_seed(0)
    plain, x = nn.LSTM(4, 3, 2, batch_first=True), torch.randn(5, 2, 4)
    mine, layout = copy.deepcopy(plain), Layout((4,), ("dp",))
    whole = {name: layout(*["None"] * p.ndim) for name, p in plain.named_parameters()}
    shard_module(mine, {"parameter": whole})
    given = distribute_tensor(x, mine.weight_ih_l0.device_mesh, [Shard(0)])
    want, (out, _) = plain(x)[0], mine(given)  # the network makes its first states itself
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), want)
    want.square().sum().backward()
    out.square().sum().backward()
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), getattr(plain, name).grad)


@pytest.mark.ranks(2)
def test_sharded_positions_and_packed_sequences_are_refused_with_reasons():
    mesh = mesh_of((2,))
    module = nn.LSTM(4, 3)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    with implicit_replication():
        with pytest.raises(RedistributionError, match=r"(?s)lstm: no strategy takes \(S\(0\).*S\(1\)"):
            module(distribute_tensor(torch.randn(6, 2, 4), mesh, [Shard(0)]))
        packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
        with pytest.raises(NotImplementedError, match="packed sequence"):
            module(packed)
