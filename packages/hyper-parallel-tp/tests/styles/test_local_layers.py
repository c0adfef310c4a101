"""Linear layers and norms that compute on plain pieces: as the general way does, and left where that is needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tp_models import hidden, mesh, twins

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    DTensor,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel_tp.styles import local_layers

R, S1, LAST = Replicate(), Shard(1), Shard(-1)


SHORT_WAYS = {
    "colwise": (lambda: nn.Linear(8, 5), lambda: ColwiseParallel(use_local_output=False), R),
    "colwise, gathered": (lambda: nn.Linear(8, 6), lambda: ColwiseParallel(input_layouts=S1, output_layouts=R), S1),
    "rowwise": (lambda: nn.Linear(5, 8), lambda: RowwiseParallel(), LAST),
    "rowwise in sequence": (
        lambda: nn.Linear(6, 8, bias=False),
        lambda: RowwiseParallel(output_layouts=S1, use_local_output=False),
        LAST,
    ),
    "layer norm": (lambda: nn.LayerNorm(8), lambda: SequenceParallel(), S1),
    "rms norm": (lambda: nn.RMSNorm(8), lambda: SequenceParallel(use_local_output=True), S1),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SHORT_WAYS)
def test_the_short_way_gives_what_the_general_way_gives(name):
    make, style, layout = SHORT_WAYS[name]
    modules = twins(make)
    with pytest.MonkeyPatch.context() as patch:
        short = counted(patch)
        parallelize_module(modules[0], mesh(), style())
        patch.setattr(local_layers, "_FUNCTIONS", {})
        parallelize_module(modules[1], mesh(), style())
    given = distribute_tensor(hidden(2, 4, getattr(modules[0], "in_features", 8)), mesh(), [layout])
    for plain, low in ((False, False), (True, False), (True, True)):
        found = []
        for module in modules:
            x = (given.to_local() if plain else given).detach().requires_grad_()
            module.zero_grad()
            with CommTrace() as trace, torch.autocast("cpu", torch.bfloat16, enabled=low):
                out = module(x * 1)
                out.double().pow(2).sum().backward()
            kind = type(out), out.dtype, tuple(out.shape), out.stride(), getattr(out, "placements", None)
            values = [out, x.grad, *(p.grad for p in module.parameters())]
            found.append((kind, trace.counts, [v.to_local() if isinstance(v, DTensor) else v for v in values]))
        assert found[0][:2] == found[1][:2]
        torch.testing.assert_close(found[0][2], found[1][2])
    assert len(short) == 3


def counted(patch):
    """A list that grows by one whenever the short way is taken."""
    calls = []

    def counting(compute):
        return lambda *args, **kwargs: calls.append(compute) or compute(*args, **kwargs)

    functions = {forward: counting(compute) for forward, compute in local_layers._FUNCTIONS.items()}
    patch.setattr(local_layers, "_FUNCTIONS", functions)
    return calls


@pytest.mark.ranks(2)
def test_the_short_way_is_left_for_what_it_does_not_know():
    layer, twin = twins(lambda: nn.Linear(8, 6))
    want, whole_weight = twin(hidden()), distribute_tensor(twin.weight.detach(), mesh(), [R])
    with pytest.MonkeyPatch.context() as patch:
        short = counted(patch)
        parallelize_module(layer, mesh(), ColwiseParallel(output_layouts=R))
    torch.testing.assert_close(layer(input=hidden()), want)
    assert len(short) == 1
    torch.testing.assert_close(torch.func.functional_call(layer, {"weight": whole_weight}, hidden()), want)
    bias = layer._parameters.pop("bias")
    layer.bias = bias * 1  # as weight_norm and its like do: computed from others
    torch.testing.assert_close(layer(hidden()), want)
    assert len(short) == 1
    with pytest.raises(RuntimeError, match=r"\[8, 7\] X \[8, 6\]"):  # the sizes of the whole tensors
        layer(hidden(2, 4, 7))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [4, 5])
def test_plain_pieces_of_a_sequence_have_equal_length(length):
    layer, twin = twins(lambda: nn.Linear(8, 8))
    parallelize_module(layer, mesh(), RowwiseParallel(input_layouts=R, output_layouts=S1))
    x = hidden(2, length, 8)
    if length == 4:
        torch.testing.assert_close(layer(x), twin(x).chunk(2, 1)[mesh().get_local_rank()])
    else:
        with pytest.raises(ValueError, match="dim 1 of its output has length 5, which 2 ranks do not divide"):
            layer(x)
