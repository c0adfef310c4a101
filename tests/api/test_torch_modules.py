"""``nn.Module`` with DTensor parameters: hooks, functional_call, conversion, state dicts and initialisation."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    implicit_replication,
    redistribute_policy,
)
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make

LAYOUTS = {  # of fc1.weight, fc1.bias, fc2.weight, fc2.bias and the input
    "data parallel": ([Replicate()] * 4, Shard(0)),
    "tensor parallel": ([Shard(0), Shard(0), Shard(1), Replicate()], Replicate()),
    "replicated": ([Replicate()] * 4, Replicate()),
}
laid_out = pytest.mark.parametrize("layout", LAYOUTS)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 6, dtype=torch.float64)
        self.fc2 = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x, scale=1.0):
        return self.fc2(torch.tanh(self.fc1(x))) * scale


def nets(layout):
    """The same net plain and on a mesh, and the same input for each."""
    torch.manual_seed(0)
    plain = Net()
    placements, of_input = LAYOUTS[layout]
    placed = copy.deepcopy(plain)
    for (name, parameter), placement in zip(list(placed.named_parameters()), placements, strict=True):
        module, _, attribute = name.rpartition(".")
        data = distribute_tensor(parameter.detach(), mesh_of((4,)), [placement])
        setattr(placed.get_submodule(module), attribute, nn.Parameter(data))
    x = torch.randn(5, 3, dtype=torch.float64)
    return plain, placed, x, make(x, mesh_of((4,)), [of_input])


def same_gradients(placed, plain):
    for (name, got), want in zip(placed.named_parameters(), plain.parameters(), strict=True):
        assert got.grad.layout is got.layout, name
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


@pytest.mark.ranks(4)
@laid_out
def test_parameters_are_parameters(layout):
    _, placed, _, _ = nets(layout)
    for parameter in placed.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert (parameter.requires_grad, parameter.is_leaf) == (True, True)
    assert [n for n, _ in placed.named_parameters()] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    placed.requires_grad_(False)
    assert not any(p.requires_grad for p in placed.parameters())
    frozen = nn.Parameter(placed.fc1.weight, requires_grad=False)
    assert not frozen.requires_grad
    buffered = nn.Module()
    buffered.register_buffer("mask", placed.fc1.bias.detach())
    assert isinstance(buffered.mask, DTensor)


@pytest.mark.ranks(4)
@laid_out
def test_forward_and_gradients_are_those_of_one_device(layout):
    plain, placed, x, dx = nets(layout)
    for _ in range(2):  # the second adds up
        plain(x).square().mean().backward()
        placed(dx).square().mean().backward()
        same_gradients(placed, plain)
    placed.zero_grad()
    assert all(p.grad is None for p in placed.parameters())
    placed(dx).sum().backward()
    placed.zero_grad(set_to_none=False)
    assert all(not p.grad.full_tensor().any() for p in placed.parameters())


@pytest.mark.ranks(4)
@laid_out
def test_forward_hooks_see_and_replace_dtensors(layout):
    plain, placed, x, dx = nets(layout)
    seen = []

    def before(module, inputs):
        seen.append(type(inputs[0]))
        return (inputs[0] * 2,)

    def after(module, inputs, output):
        seen.append(type(output))
        return output + 1

    for net in (plain, placed):
        net.fc1.register_forward_pre_hook(before)
        net.fc2.register_forward_hook(after)
    torch.testing.assert_close(placed(dx).full_tensor(), plain(x))
    assert seen == [DTensor, DTensor, torch.Tensor, torch.Tensor]
    plain(x).square().sum().backward()
    placed(dx).square().sum().backward()
    same_gradients(placed, plain)


@pytest.mark.ranks(4)
@laid_out
@pytest.mark.parametrize("input_needs_grad", [False, True])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_full_backward_hooks_see_and_replace_gradients(layout, input_needs_grad):
    def run(net, x):
        seen = []

        def hook(module, grad_input, grad_output):
            seen.append((module, grad_input, grad_output))
            return None if grad_input[0] is None else tuple(3 * g for g in grad_input)

        def pre_hook(module, grad_output):
            return (grad_output[0] * 2,)

        net.fc1.register_full_backward_hook(hook)
        net.fc2.register_full_backward_hook(hook)
        net.register_full_backward_hook(hook)
        net.fc2.register_full_backward_pre_hook(pre_hook)
        x.requires_grad_(input_needs_grad)
        net(x).square().sum().backward()
        return seen, x.grad

    plain, placed, x, dx = nets(layout)
    expected, x_grad = run(plain, x)
    got, dx_grad = run(placed, dx)
    assert [type(m) for m, _, _ in got] == [type(m) for m, _, _ in expected]
    for (_, *grads), (_, *wanted) in zip(got, expected, strict=True):
        for grad, want in zip(sum(grads, ()), sum(wanted, ()), strict=True):
            assert (grad is None) == (want is None)
            if want is not None:
                assert isinstance(grad, DTensor)
                torch.testing.assert_close(grad.full_tensor(), want)
    same_gradients(placed, plain)
    if input_needs_grad:
        assert dx_grad.placements == dx.placements
        torch.testing.assert_close(dx_grad.full_tensor(), x_grad)


@pytest.mark.ranks(4)
def test_backward_hooks_of_modules_that_share_an_input_fire_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Tanh(), nn.Sigmoid()

        def forward(self, x):
            return self.left(x) + self.right(x) * x

    def run(x):
        net, seen = Twice(), []
        for module in net.modules():
            module.register_full_backward_hook(lambda m, i, o: seen.append((type(m).__name__, i[0], o[0])))
        net(x * 2).sum().backward()
        return seen

    _, _, x, dx = nets("data parallel")
    expected, got = run(x.requires_grad_()), run(dx.requires_grad_())
    assert sorted(n for n, _, _ in got) == sorted(n for n, _, _ in expected) == ["Sigmoid", "Tanh", "Twice"]
    by_name = {n: grads for n, *grads in got}
    for name, *wanted in expected:
        for grad, want in zip(by_name[name], wanted, strict=True):
            torch.testing.assert_close(grad.full_tensor(), want)
    torch.testing.assert_close(dx.grad.full_tensor(), x.grad)


@pytest.mark.ranks(4)
@laid_out
def test_functional_call(layout):
    plain, placed, x, dx = nets(layout)

    def run(net, x):
        parameters = {n: (p.detach() * 2).requires_grad_() for n, p in net.named_parameters()}
        out = torch.func.functional_call(net, parameters, (x,), {"scale": 0.5})
        return out, torch.autograd.grad(out.square().sum(), tuple(parameters.values()))

    out, gradients = run(plain, x)
    dout, dgradients = run(placed, dx)
    torch.testing.assert_close(dout.full_tensor(), out)
    for got, want in zip(dgradients, gradients, strict=True):
        torch.testing.assert_close(got.full_tensor(), want)
    assert all(p.grad is None for p in placed.parameters())


@pytest.mark.ranks(4)
@laid_out
def test_module_to_another_dtype(layout):
    plain, placed, x, dx = nets(layout)
    parameters = list(placed.parameters())
    placements = [p.placements for p in parameters]
    for convert in (lambda m: m.to(torch.float32), lambda m: m.float(), lambda m: m.to("cpu", torch.float32)):
        convert(placed.double())
        assert [p.placements for p in placed.parameters()] == placements
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in placed.parameters())
        assert {p.dtype for p in placed.parameters()} == {torch.float32}
    assert all(p is q for p, q in zip(placed.parameters(), parameters, strict=True))  # as optimizers need
    plain.float()(x.float()).square().sum().backward()
    placed(dx.detach().to(torch.float32)).square().sum().backward()
    same_gradients(placed, plain)
    placed.half()
    assert {p.dtype for p in placed.parameters()} == {torch.float16}
    placed.bfloat16().cpu()
    assert {p.dtype for p in placed.parameters()} == {torch.bfloat16}


@pytest.mark.ranks(4)
@laid_out
def test_state_dict_round_trip(layout):
    _, placed, _, _ = nets(layout)
    state = placed.state_dict()
    assert all(type(v) is DTensor for v in state.values())
    assert not any(v.requires_grad for v in state.values())
    other = copy.deepcopy(placed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert not torch.equal(other.fc1.weight.full_tensor(), placed.fc1.weight.full_tensor())
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    for got, want in zip(other.parameters(), placed.parameters(), strict=True):
        assert got.layout is want.layout
        assert torch.equal(got.full_tensor(), want.full_tensor())
    other.load_state_dict({n: v * 3 for n, v in state.items()}, assign=True)
    assert torch.equal(other.fc1.weight.full_tensor(), 3 * placed.fc1.weight.full_tensor())
    assert isinstance(other.fc1.weight, nn.Parameter)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        other.load_state_dict(state)
        other.float().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    torch.testing.assert_close(other.fc1.weight.full_tensor(), placed.fc1.weight.full_tensor(), rtol=1e-6, atol=1e-6)
    assert other.fc1.weight.layout is placed.fc1.weight.layout


class Squashed(nn.Module):
    def forward(self, weight):
        return torch.tanh(weight)

    def right_inverse(self, weight):
        return torch.atanh(weight)


PARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "own": lambda module: parametrize.register_parametrization(module, "weight", Squashed()),
}


@pytest.mark.ranks(4)
@laid_out
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_modules(layout, name):
    plain, placed, x, dx = nets(layout)
    with redistribute_policy("auto"), implicit_replication():
        for net, given in ((plain, x), (placed, dx)):
            torch.manual_seed(1)
            PARAMETRIZED[name](net.fc1)
            net(given).square().mean().backward()
        torch.testing.assert_close(placed(dx).full_tensor(), plain(x))
    for got, want in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


@pytest.mark.ranks(4)
def test_loading_what_does_not_fit_is_an_error():
    plain, placed, _, _ = nets("tensor parallel")
    before = placed.fc1.weight.full_tensor()
    with pytest.raises(RuntimeError, match=r"fc1\.weight.*plain tensor"):
        placed.load_state_dict(plain.state_dict())
    assert torch.equal(placed.fc1.weight.full_tensor(), before)
    with pytest.raises(RuntimeError, match="size mismatch"):
        placed.load_state_dict({n: v[:1] for n, v in placed.state_dict().items()})


@pytest.mark.ranks(4)
@laid_out
def test_deepcopy_of_a_module_is_independent(layout):
    plain, placed, x, dx = nets(layout)
    copied = copy.deepcopy(placed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    torch.testing.assert_close(placed(dx).full_tensor(), plain(x))


INITIALISERS = {
    "normal_": lambda t: nn.init.normal_(t, 1.0, 2.0),
    "uniform_": lambda t: nn.init.uniform_(t, -1.0, 2.0),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t, 0.0, 1.0, -0.5, 0.5),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "constant_": lambda t: nn.init.constant_(t, 3.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_give_the_values_of_one_device(name):
    for placement in (Shard(0), Shard(1), Replicate()):
        torch.manual_seed(7)
        plain = nn.Parameter(torch.empty(5, 3, dtype=torch.float64))
        INITIALISERS[name](plain)
        after = torch.rand(1)
        torch.manual_seed(7)
        parameter = nn.Parameter(make(torch.full((5, 3), 9.0, dtype=torch.float64), mesh_of((4,)), [placement]))
        assert INITIALISERS[name](parameter) is parameter
        assert torch.equal(parameter.detach().full_tensor(), plain.detach())
        assert torch.equal(torch.rand(1), after)


@pytest.mark.ranks(4)
def test_reset_parameters_works_on_distributed_modules():
    net = distribute_module(Net(), mesh_of((4,)))
    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3)
    net.fc1.reset_parameters()
    net.fc2.reset_parameters()
    for got, want in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach())


@pytest.mark.ranks(4)
def test_modules_made_on_meta_can_be_filled():
    with torch.device("meta"):
        net = Net()
    net = distribute_module(net, mesh_of((4,)), lambda name, module, mesh: None)
    assert all(p.is_meta and isinstance(p, DTensor) for p in net.parameters())
    net.to_empty(device="cpu")
    assert all(not p.is_meta and isinstance(p, DTensor) for p in net.parameters())
    torch.manual_seed(0)
    net.fc1.reset_parameters()
    torch.manual_seed(0)
    torch.testing.assert_close(
        net.fc1.weight.detach().full_tensor(), nn.Linear(3, 6, dtype=torch.float64).weight.detach()
    )
