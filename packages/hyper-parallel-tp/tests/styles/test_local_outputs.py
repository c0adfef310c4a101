"""Plain outputs that are equal on all ranks, where they meet plain shards: each rank has one term of their gradient."""

import copy

import pytest
import torch
from torch import nn
from tp_models import hidden, mesh

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    NoParallel,
    Partial,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    parallelize_module,
)


class SharedKeys(nn.Module):
    """As multi-head latent attention has them: part of each head's key is one vector, the same for all heads."""

    def __init__(self, width=8, heads=4, own=2, shared=2):
        super().__init__()
        self.own_size = own
        self.own = nn.Linear(width, heads * own)
        self.shared = nn.Linear(width, shared)
        self.out = nn.Linear(heads * (own + shared), width)

    def forward(self, x):
        own = self.own(x).unflatten(-1, (-1, self.own_size))
        shared = self.shared(x).unsqueeze(-2).expand(*own.shape[:-1], -1)
        return self.out(torch.cat([own, shared], -1).sin().flatten(-2))


def both(shared_style, **others):
    torch.manual_seed(0)
    plain = SharedKeys().double()
    plan = {"own": ColwiseParallel(), "out": RowwiseParallel(), "shared": shared_style, **others}
    return plain, parallelize_module(copy.deepcopy(plain), mesh(), plan)


def assert_same_gradients(plain, model):
    for x, m in ((hidden(), plain), (hidden(), model)):
        m.input = x.requires_grad_()
        m(m.input).square().sum().backward()
    torch.testing.assert_close(model.input.grad, plain.input.grad)
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        got = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        torch.testing.assert_close(got, want.grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "style",
    [
        NoParallel(),
        ColwiseParallel(output_layouts=Replicate()),
        RowwiseParallel(input_layouts=Replicate()),
    ],
)
def test_a_whole_plain_output_that_meets_shards_is_refused_in_the_first_backward(style):
    _, model = both(style)
    with pytest.raises(ValueError, match=r"Linear: its style hands .*local_output_grad_placements=\[Partial\(\)\]"):
        model(hidden().requires_grad_()).square().sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "style",
    [
        NoParallel(local_output_grad_placements=[Partial()]),
        ColwiseParallel(output_layouts=Replicate(), local_output_grad_placements=[Partial()]),
        RowwiseParallel(input_layouts=Replicate(), local_output_grad_placements=[Partial()]),
    ],
)
def test_said_that_its_gradient_is_a_term_it_gives_the_gradients_of_one_device(style):
    assert_same_gradients(*both(style))


@pytest.mark.ranks(2)
def test_prepare_module_output_takes_it_too():
    keep = NoParallel(use_local_output=False)
    give = PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Replicate(), local_output_grad_placements=[Partial()]
    )
    plain, model = both(keep)
    give.apply(model.shared, mesh())
    assert_same_gradients(plain, model)


@pytest.mark.ranks(2)
def test_whole_outputs_that_meet_only_whole_tensors_pass_and_no_trace_counts_the_comparison():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)).double()
    plan = {"0": NoParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(plain), mesh(), plan)
    with CommTrace() as trace:
        assert_same_gradients(plain, model)
    assert trace.counts["all_reduce"] == 2  # the output of the last layer, the gradient of the input of the second


@pytest.mark.ranks(2)
def test_gradients_that_are_not_finite_are_compared_in_a_later_step():
    _, model = both(NoParallel())
    (model(hidden().requires_grad_()) * float("inf")).sum().backward()
    with pytest.raises(ValueError, match="its gradient differs by rank"):
        model(hidden().requires_grad_()).square().sum().backward()
