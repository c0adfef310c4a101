"""Inputs and outputs that styles lay out: all of them are kept, whatever the module takes and returns."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from tp_models import Attention, hidden, mesh, twins

from hyper_parallel import (
    DTensor,
    NoParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.tensor.autograd_bridge import InFlight
from hyper_parallel.utils.structures import parts_of

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@dataclasses.dataclass(frozen=True)
class Out:
    """What some models return."""

    x: Any
    mask: Any
    rest: Any
    size: int = dataclasses.field(init=False, default=3)


class Returning(nn.Module):
    """Returns its inputs, in some kind of structure."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, mask, rest):
        return self.kind(x, mask, rest)


class ManyInputs(nn.Module):
    """Records what it is called with, and returns three things."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x, mask=None, *rest, bias=None, **more):
        self.seen = (x, mask, rest, bias, more)
        return {"x": x, "mask": mask, "rest": rest}


@pytest.mark.ranks(2)
def test_inputs_are_laid_out_and_all_are_kept():
    module = PrepareModuleInput(
        input_layouts=(S1, None),
        desired_input_layouts=(R, None),
        input_kwarg_layouts={"bias": S0, "extra": R},
        desired_input_kwarg_layouts={"bias": R, "extra": S0},
    ).apply(ManyInputs(), mesh())
    rank = mesh().get_local_rank()
    x, mask, bias, extra = hidden(), hidden(2), hidden(4), hidden(4, 2)
    module(x.chunk(2, 1)[rank], mask, "third", bias=bias.chunk(2)[rank], extra=extra, other=7)
    seen, seen_mask, rest, seen_bias, more = module.seen
    assert seen.placements == (R,)
    assert seen_mask is mask
    assert rest == ("third",)
    assert more["other"] == 7
    assert more["extra"].placements == (S0,)
    for found, want in ((seen, x), (seen_bias, bias), (more["extra"], extra)):
        torch.testing.assert_close(found.full_tensor(), want)
    module(mask=mask, x=x.chunk(2, 1)[rank])  # by name, in any order
    torch.testing.assert_close(module.seen[0].full_tensor(), x)
    with pytest.raises(ValueError, match=r"lays out 2 positional inputs, called with 0 and keywords \['x0'\]"):
        module(x0=x)


@pytest.mark.ranks(2)
def test_a_forward_that_another_library_replaced():
    """As accelerate does: a partial on the instance. Names and positions of arguments stay."""
    module = ManyInputs()
    module.forward = functools.update_wrapper(functools.partial(ManyInputs.forward, module), module.forward)
    signature = inspect.signature(module.forward)
    style = PrepareModuleInput(input_kwarg_layouts={"bias": S0}, desired_input_kwarg_layouts={"bias": R})
    parallelize_module(module, mesh(), {"": NoParallel(use_local_output=False)})
    style.apply(module, mesh())
    assert inspect.signature(module.forward) == signature
    module(hidden(), "mask", bias=hidden(4).chunk(2)[mesh().get_local_rank()])
    torch.testing.assert_close(module.seen[3].full_tensor(), hidden(4))
    torch.testing.assert_close(module.seen[0].full_tensor(), hidden())
    assert module.seen[1] == "mask"


KINDS = {
    "tuple": lambda *values: values,
    "list": lambda *values: list(values),
    "named tuple": collections.namedtuple("Named", "x mask rest"),
    "dict": lambda *values: dict(zip(("x", "mask", "rest"), values, strict=True)),
    "mapping": lambda *values: collections.OrderedDict(zip((1, 2, 3), values, strict=True)),
    "dataclass": Out,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_laid_out_and_all_are_kept(kind):
    module = Returning(KINDS[kind])
    PrepareModuleOutput(output_layouts=(S1, None), desired_output_layouts=(R, None)).apply(module, mesh())
    out = module(hidden().chunk(2, 1)[mesh().get_local_rank()], "mask", "third")
    assert type(out) is type(KINDS[kind](1, 2, 3))
    x, mask, rest, *_ = parts_of(out)
    torch.testing.assert_close(x, hidden())
    assert (mask, rest) == ("mask", "third")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_inside_of_others_are_handed_out(kind):
    """NoParallel: plain tensors, wherever a DTensor was; an output without DTensors is the very same object."""
    module = parallelize_module(Returning(KINDS[kind]), mesh(), NoParallel())
    spread = distribute_tensor(hidden(), mesh(), [S1])
    out = module(spread, {"deep": [KINDS[kind](spread, None, 1)]}, None)
    assert type(out) is type(KINDS[kind](1, 2, 3))
    x, mask, _, *_ = parts_of(out)
    for found in (x, parts_of(mask["deep"][0])[0]):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, hidden())
    passed = KINDS[kind](1, 2, 3)
    assert parts_of(module(spread, passed, None))[1] is passed


@pytest.mark.ranks(2)
@pytest.mark.parametrize("local", [False, True])
def test_inputs_and_outputs_of_a_module_of_plain_code(local):
    """Its forward needs the whole sequence; the world around works on parts of it."""

    class Reversed(nn.Module):
        def forward(self, x):
            return x.flip(1) * torch.arange(1.0, 1 + x.shape[1], dtype=x.dtype).view(1, -1, 1)

    style = PrepareModuleInputOutput(
        input_layouts=S1,
        desired_input_layouts=R,
        use_local_input=local,
        output_layouts=R,
        desired_output_layouts=S1,
        use_local_output=local,
    )
    module = parallelize_module(Reversed(), mesh(), style)
    rank = mesh().get_local_rank()
    piece = hidden().chunk(2, 1)[rank].clone().requires_grad_()
    y = hidden().requires_grad_()
    out, want = module(piece), Reversed()(y)
    assert isinstance(out, DTensor) != local
    found = out.to_local() if isinstance(out, DTensor) else out
    torch.testing.assert_close(found, want.chunk(2, 1)[rank])
    out.pow(3).sum().backward()
    want.pow(3).sum().backward()
    torch.testing.assert_close(piece.grad, y.grad.chunk(2, 1)[rank])


@pytest.mark.ranks(2)
def test_layouts_that_do_not_go_together():
    with pytest.raises(ValueError, match="input_layouts and desired_input_layouts go together, one for one"):
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(S1,))
    with pytest.raises(ValueError, match="input_kwarg_layouts and desired_input_kwarg_layouts go together"):
        PrepareModuleInput(input_kwarg_layouts={"x": R}, desired_input_kwarg_layouts={"y": R})
    style = PrepareModuleInput(input_kwarg_layouts={"hiden": R}, desired_input_kwarg_layouts={"hiden": R})
    with pytest.raises(ValueError, match=r"Attention\.forward has no argument 'hiden'; it takes x"):
        style.apply(Attention(), mesh())
    module = PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(R, R)).apply(nn.Identity(), mesh())
    with pytest.raises(ValueError, match="Identity: its style lays out 2 outputs, it returned 1"):
        module(hidden())
    module = PrepareModuleInput(input_layouts=S1, desired_input_layouts=R).apply(nn.Identity(), mesh())
    with pytest.raises(TypeError, match=r"Identity: its style lays out a tensor as Shard\(dim=1\) and got tuple"):
        module((hidden(), hidden()))
    assert module(None) is None


@pytest.mark.ranks(2)
def test_collectives_at_boundaries_are_in_flight_until_used():
    layer, twin = twins(lambda: nn.Linear(8, 6))
    parallelize_module(layer, mesh(), RowwiseParallel(input_layouts=R, use_local_output=False))
    out = layer(hidden())
    assert isinstance(out._pending, InFlight)
    torch.testing.assert_close(out.full_tensor(), twin(hidden()))
    assert not isinstance(out._pending, InFlight)
    style = PrepareModuleInput(input_layouts=S1, desired_input_layouts=R)
    module = style.apply(ManyInputs(), mesh())
    x = distribute_tensor(hidden(), mesh(), [S1]) * 1  # no leaf, whose owner may write to it
    module(x)
    first = module.seen[0]
    assert isinstance(first._pending, InFlight)
    first.sum()
    assert not isinstance(first._pending, InFlight)
    module(x)
    assert module.seen[0] is first  # completing it counted as no change
    torch.testing.assert_close(first.to_local(), hidden())


@pytest.mark.ranks(4)
def test_a_batch_on_a_larger_mesh_keeps_its_data_axis():
    full = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = PrepareModuleInput(input_layouts=S1, desired_input_layouts=R).apply(ManyInputs(), full["tp"])
    module(distribute_tensor(hidden(), full, [S0, S1]))
    assert module.seen[0].placements == (S0, R)
    torch.testing.assert_close(module.seen[0].full_tensor(), hidden())
