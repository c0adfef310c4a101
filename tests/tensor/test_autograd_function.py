"""Plain ``torch.autograd.Function.apply`` on DTensors: C++ code that knows nothing of them, and loses no gradient."""

import contextlib
import gc
import weakref

import pytest
import torch

from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make

PLACEMENTS = [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Replicate()], [Partial(), Replicate()]]
placed = pytest.mark.parametrize("placements", PLACEMENTS, ids=str)


def values(count, shape=(5, 3)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(count)]


def compare(program, inputs, placements, varying=()):
    """The loss and the gradients of ``program`` on DTensors against those on plain tensors."""
    plain = [v.clone().requires_grad_() for v in inputs]
    expected = program(*plain)
    expected.backward()
    mesh = mesh_of((2, 2))
    tensors = [make(v, mesh, placements, requires_grad=True, varying=varying) for v in inputs]
    loss = program(*tensors)
    torch.testing.assert_close(loss.detach().full_tensor(), expected.detach())
    loss.backward()
    for tensor, want in zip(tensors, plain, strict=True):
        if want.grad is None:
            assert tensor.grad is None
        else:
            assert tensor.grad.placements == tensor.grad_placements
            torch.testing.assert_close(tensor.grad.full_tensor(), want.grad)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class SumAndProduct(torch.autograd.Function):
    """Two outputs, saved inputs and a saved output, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx, x, y, scale):
        product = x * y * scale
        ctx.scale = scale
        ctx.save_for_backward(x, y, product)
        return x + y, product

    @staticmethod
    def backward(ctx, grad_sum, grad_product):
        x, y, _product = ctx.saved_tensors
        return grad_sum + grad_product * y * ctx.scale, grad_sum + grad_product * x * ctx.scale, None


class ClipGradient(torch.autograd.Function):
    """Not linear in the gradient: it must run once, with the complete gradient."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ClipGradient.calls += 1
        return grad.clamp(-1.0, 1.0)


class PassThrough(torch.autograd.Function):
    """Returns its inputs, as module backward hooks do."""

    @staticmethod
    def forward(ctx, *tensors):
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        return tuple(2 * g for g in grads)


def function(forward, backward):
    """An autograd.Function of two functions without ``ctx``."""
    methods = {"forward": lambda ctx, *args: forward(*args), "backward": lambda ctx, *grads: backward(*grads)}
    made = {name: staticmethod(method) for name, method in methods.items()}
    return type("Made", (torch.autograd.Function,), made)


@pytest.mark.ranks(4)
@placed
def test_saved_tensors_and_double_use(placements):
    compare(lambda x: Cube.apply(x).sum(), values(1), placements)
    compare(lambda x: (Cube.apply(x) * Cube.apply(x + 1)).sum(), values(1), placements)


@pytest.mark.ranks(4)
@placed
def test_several_outputs_used_together_alone_and_not_at_all(placements):
    def together(x, y):
        total, product = SumAndProduct.apply(x, y, 0.5)
        return (total * product).sum()

    def only_the_second(x, y):
        return SumAndProduct.apply(x, y, 0.5)[1].pow(2).sum()

    def one_input_twice(x):
        total, product = SumAndProduct.apply(x, x, 0.5)
        return (total * 3 + product).sum()

    compare(together, values(2), placements)
    compare(only_the_second, values(2), placements)
    compare(one_input_twice, values(1), placements)


@pytest.mark.ranks(4)
@placed
def test_inputs_returned_as_outputs(placements):
    def program(x, y):
        a, b = PassThrough.apply(x * 3, y)
        return (a * b + y).sum()

    compare(program, values(2), placements)


@pytest.mark.ranks(4)
@placed
def test_none_gradients_and_inputs_without_gradient(placements):
    first_only = function(lambda x, y: x * 2, lambda grad: (grad * 2, None))
    compare(lambda x, y: (first_only.apply(x, y) * x).sum(), values(2), placements)
    compare(lambda x: (first_only.apply(x, x.detach()) * x).sum(), values(1), placements)


@pytest.mark.ranks(4)
@placed
def test_applies_chained_without_an_operator_between(placements):
    compare(lambda x: Cube.apply(Cube.apply(Cube.apply(x))).sum(), values(1), placements)
    compare(lambda x, y: Cube.apply(SumAndProduct.apply(Cube.apply(x), y, 2.0)[0]).sum(), values(2), placements)


@pytest.mark.ranks(4)
@placed
def test_applies_between_normal_operators(placements):
    def program(x, y):
        hidden = torch.tanh(x * y)
        cubed = Cube.apply(hidden)
        total, product = SumAndProduct.apply(cubed * x, hidden, 2.0)
        return (Cube.apply(total) + product * cubed + hidden).mean()

    compare(program, values(2), placements)


@pytest.mark.ranks(4)
@placed
def test_a_result_used_several_times_runs_backward_once_with_the_whole_gradient(placements):
    """As on one device; a gradient in terms would be clipped term by term."""

    def through_operators(x):
        y = ClipGradient.apply(x)
        return (y * 0.8).sum() + (y * 0.7).sum()

    def through_functions(x):
        y = ClipGradient.apply(x)
        return (PassThrough.apply(y * 1)[0] * 0.4 + PassThrough.apply(y)[0] * 0.4 + Cube.apply(y) * 0).sum()

    for program in (through_operators, through_functions):
        ClipGradient.calls = 0
        compare(program, values(1), placements)
        assert ClipGradient.calls == 2  # once on plain tensors, once on DTensors


@pytest.mark.ranks(4)
def test_gradients_of_a_shard_and_of_a_varying_input():
    mesh = mesh_of((2, 2))
    x, w = values(2)
    plain = [v.clone().requires_grad_() for v in (x, w)]
    SumAndProduct.apply(*plain, 2.0)[1].sum().backward()
    tensors = [
        make(x, mesh, [Shard(0), Shard(1)], requires_grad=True),
        make(w, mesh, [Replicate(), Replicate()], varying=[0, 1], requires_grad=True),
    ]
    SumAndProduct.apply(*tensors, 2.0)[1].sum().backward()
    for tensor, want in zip(tensors, plain, strict=True):
        assert tensor.grad.placements == tensor.grad_placements
        torch.testing.assert_close(tensor.grad.full_tensor(), want.grad)
    assert tensors[1].grad.placements == (Partial(), Partial())


@pytest.mark.ranks(4)
@placed
def test_gradients_may_come_back_in_any_layout(placements):
    gather = function(
        lambda x: x.redistribute(placements=[Replicate(), Replicate()]),
        lambda grad: grad.redistribute(placements=[Shard(0), Shard(0)]),
    )
    x = make(values(1)[0], mesh_of((2, 2)), placements, requires_grad=True)
    (gather.apply(x) * 3).sum().backward()
    assert x.grad.placements == x.grad_placements
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 3.0, dtype=torch.float64))


@pytest.mark.ranks(4)
@placed
@pytest.mark.parametrize("saving", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_autograd_grad_and_double_backward(placements, saving):
    """With hooks on saved tensors C++ unpacks copies of the wrappers, which must lead to what was saved."""
    (value,) = values(1)

    def penalty(x):
        with saving():
            y = Cube.apply(torch.sin(x))
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (gradient**2).sum()

    plain = value.clone().requires_grad_()
    (expected,) = torch.autograd.grad(penalty(plain), plain)
    x = make(value, mesh_of((2, 2)), placements, requires_grad=True)
    (gradient,) = torch.autograd.grad(penalty(x), x)
    torch.testing.assert_close(gradient.full_tensor(), expected)


@pytest.mark.ranks(4)
def test_a_graph_is_kept_or_freed_as_the_caller_says():
    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    loss = Cube.apply(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad.full_tensor(), 6 * values(1)[0] ** 2)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.ranks(4)
def test_backward_straight_from_the_result():
    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    y = Cube.apply(x)
    assert y.requires_grad
    assert not y.is_leaf
    assert y.grad_fn.name() == "CubeBackward"
    y.backward(torch.ones(5, 3, dtype=torch.float64))
    torch.testing.assert_close(x.grad.full_tensor(), 3 * values(1)[0] ** 2)


@pytest.mark.ranks(4)
def test_results_may_be_written_in_place():
    def program(x, y):
        z = Cube.apply(x)
        z.mul_(y)
        z += 1
        return (Cube.apply(z) * z).sum()

    compare(program, values(2), [Shard(0), Shard(1)])


@pytest.mark.ranks(4)
def test_results_may_be_detached_in_place():
    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    for used in (False, True):
        y = Cube.apply(x)
        if used:
            y.sum()
        y.detach_()
        assert (y.requires_grad, y.is_leaf, y.grad_fn) == (False, True, None)
        (Cube.apply(y) + x).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.ones(5, 3, dtype=torch.float64))
        x.grad = None


@pytest.mark.ranks(4)
def test_hooks_on_results_see_dtensors():
    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    y = Cube.apply(x)
    seen = []
    with torch.no_grad():
        y.register_hook(seen.append)
        y.retain_grad()
    (y * 2).sum().backward()
    assert torch.equal(seen[0].full_tensor(), torch.full((5, 3), 2.0, dtype=torch.float64))
    assert torch.equal(y.grad.full_tensor(), seen[0].full_tensor())


@pytest.mark.ranks(4)
def test_an_input_written_after_the_function_keeps_the_gradient_right_or_raises():
    def used_first(x):
        h = x * 1
        z = Cube.apply(h)
        loss = z.sum()
        h.mul_(2)
        return loss + h.sum()

    triple = function(lambda x: x * 3, lambda grad: grad * 3)

    def program(x):
        h = x * 1
        z = triple.apply(h)
        loss = z.sum()
        h.mul_(2)
        return loss + (triple.apply(h) * h).sum()

    compare(program, values(1), [Shard(0), Shard(1)])
    with pytest.raises(RuntimeError, match=r"in-?place"):
        compare(used_first, values(1), [Shard(0), Shard(1)])  # what it saved was written: as on one device
    x = make(values(1)[0], mesh_of((2, 2)), [Shard(0), Shard(1)], requires_grad=True)
    h = x * 1
    z = triple.apply(h)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="written in place after it went into"):
        z.sum()


@pytest.mark.ranks(4)
def test_inputs_marked_dirty():
    class AddTo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, target, source):
            target.add_(source)
            ctx.mark_dirty(target)
            return target

        @staticmethod
        def backward(ctx, grad):
            return grad, grad * 1

    def program(x):
        target = torch.zeros_like(x)
        AddTo.apply(target, x)
        return (target * x).sum()

    compare(program, values(1), [Shard(0), Shard(1)])


@pytest.mark.ranks(4)
def test_outputs_in_flight_are_joined_too():
    gather_later = function(lambda x: x.redistribute(placements=[Replicate()], async_op=True), lambda grad: grad * 5)
    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    (gather_later.apply(x) * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 10.0, dtype=torch.float64))


@pytest.mark.ranks(4)
def test_gradients_in_another_dtype_are_cast_as_on_one_device():
    half = function(lambda x: x * 2, lambda grad: (grad * 2).to(torch.float32))
    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    half.apply(x).sum().backward()
    assert x.grad.dtype == torch.float64
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 2.0, dtype=torch.float64))


@pytest.mark.ranks(4)
def test_a_plain_gradient_for_a_dtensor_is_refused():
    wrong = function(lambda x: x * 2, lambda grad: torch.ones(5, 3, dtype=torch.float64))
    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    with pytest.raises(TypeError, match="returned a Tensor as the gradient of a DTensor"):
        wrong.apply(x).sum().backward()


@pytest.mark.ranks(4)
def test_non_differentiable_outputs_and_no_grad():
    class WithIndex(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            positive = x > 0
            ctx.mark_non_differentiable(positive)
            return x * 2, positive

        @staticmethod
        def backward(ctx, grad, _):
            return grad * 2

    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    y, positive = WithIndex.apply(x)
    assert (y.requires_grad, positive.requires_grad, positive.dtype) == (True, False, torch.bool)
    torch.where(positive, y, y * 0).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2.0 * (values(1)[0] > 0))
    with torch.no_grad():
        assert not Cube.apply(x).requires_grad
    assert not Cube.apply(x.detach()).requires_grad


@pytest.mark.ranks(4)
def test_plain_parameters_beside_dtensors():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale, (grad * x).sum().full_tensor()

    value = values(1)[0]
    x = make(value, mesh_of((4,)), [Shard(0)], requires_grad=True)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    Scaled.apply(x, scale).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 3.0, dtype=torch.float64))
    torch.testing.assert_close(scale.grad, value.sum())


@pytest.mark.ranks(4)
def test_nothing_stays_alive_after_a_step():
    x = make(values(1)[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    Cube.apply(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        y = Cube.apply(x * 2)
        z = PassThrough.apply(y)[0]
        loss = (z * y).sum()
        loss.backward()
        alive = [weakref.ref(t) for d in (y, z, loss) for t in (d, d._local)]
        del y, z, loss
        assert [r() for r in alive] == [None] * len(alive)
    finally:
        gc.enable()
