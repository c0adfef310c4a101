"""``backward``, ``torch.autograd.grad``, ``.grad`` and hooks on DTensors, against plain tensors on one device."""

import gc
import threading
import weakref

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make


def values():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5, 3), (3, 6), (6,))]


def loss_of(x, w, b):
    """Elementwise and matrix products, a broadcast, and a reduction, some of them with pending sums."""
    hidden = torch.tanh(x @ w + b)
    return (hidden * hidden.detach() + hidden).mean() + (x * x).sum() * 0.1


PLACED = {
    "data parallel": ([Shard(0), Shard(0)], [Replicate(), Replicate()], [Replicate(), Replicate()]),
    "column parallel": ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Replicate(), Shard(0)]),
    "row parallel": ([Replicate(), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]),
    "replicated": ([Replicate(), Replicate()], [Replicate(), Replicate()], [Replicate(), Replicate()]),
    "pending": ([Partial(), Replicate()], [Replicate(), Replicate()], [Replicate(), Partial()]),
}


def place(layout, requires_grad=True, varying=()):
    mesh = mesh_of((2, 2))
    return [
        make(v, mesh, p, requires_grad=requires_grad, varying=[a for a in varying if p[a] == Replicate()])
        for v, p in zip(values(), PLACED[layout], strict=True)
    ]


def expected_gradients():
    plain = [v.requires_grad_() for v in values()]
    return torch.autograd.grad(loss_of(*plain), plain)


def check(gradients, tensors, expected):
    for gradient, tensor, want in zip(gradients, tensors, expected, strict=True):
        assert isinstance(gradient, DTensor)
        assert gradient.placements == tensor.grad_placements
        torch.testing.assert_close(gradient.full_tensor(), want)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", PLACED)
def test_backward_gives_the_gradients_of_one_device(layout):
    tensors = place(layout)
    assert loss_of(*tensors).backward() is None
    check([t.grad for t in tensors], tensors, expected_gradients())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", ["replicated", "column parallel"])
def test_varying_inputs_and_losses_give_the_gradients_of_one_device(layout):
    tensors = place(layout, varying=(0, 1))
    loss = loss_of(*tensors)
    if layout == "replicated":
        assert loss.grad_placements == (Partial(), Partial())
    loss.backward()
    check([t.grad for t in tensors], tensors, expected_gradients())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", PLACED)
def test_autograd_grad_returns_dtensors(layout):
    tensors = place(layout)
    gradients = torch.autograd.grad(loss_of(*tensors), tensors)
    check(gradients, tensors, expected_gradients())
    assert all(t.grad is None for t in tensors)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", PLACED)
def test_double_backward_is_that_of_one_device(layout):
    def penalty(*tensors):
        gradients = torch.autograd.grad(loss_of(*tensors), tensors, create_graph=True)
        return sum((g * g).sum() for g in gradients)

    plain = [v.requires_grad_() for v in values()]
    expected = torch.autograd.grad(penalty(*plain), plain)
    tensors = place(layout)
    check(torch.autograd.grad(penalty(*tensors), tensors), tensors, expected)
    penalty(*tensors).backward()
    check([t.grad for t in tensors], tensors, expected)


@pytest.mark.ranks(4)
def test_double_backward_through_redistributions():
    mesh = mesh_of((4,))

    def penalty(x, w, move):
        hidden = torch.tanh(move(x) * w)
        (gradient,) = torch.autograd.grad((hidden**2).sum(), x, create_graph=True)
        return (gradient**3).sum()

    generator = torch.Generator().manual_seed(1)
    value, weight = (torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    plain = [value.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.autograd.grad(penalty(*plain, lambda t: t), plain)
    for source, target in (
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(1)),
        (Partial(), Shard(0)),
        (Partial(), Replicate()),
    ):
        x = make(value, mesh, [source], requires_grad=True)
        w = make(weight, mesh, [target], requires_grad=True)
        gradients = torch.autograd.grad(penalty(x, w, lambda t, to=target: t.redistribute(placements=[to])), [x, w])
        check(gradients, [x, w], expected)


@pytest.mark.ranks(4)
def test_implicit_seeds_are_for_scalars_only():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        (x.detach() * 2).sum().backward()
    with pytest.raises(RuntimeError, match="shape"):
        (x * 2).backward(torch.ones(2))
    # One element is a scalar, whatever its rank.
    (x * 2).sum().reshape(1, 1).backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 2.0, dtype=torch.float64))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_explicit_seeds_may_be_plain_or_in_any_layout(placement):
    mesh, value = mesh_of((4,)), values()[0]
    seed = torch.sin(value)
    for given in (seed, *(make(seed, mesh, [p]) for p in (Shard(0), Shard(1), Replicate(), Partial()))):
        x = make(value, mesh, [placement], requires_grad=True)
        (x * 3).backward(given)
        torch.testing.assert_close(x.grad.full_tensor(), 3 * seed)


@pytest.mark.ranks(4)
def test_backward_accumulates_and_respects_its_arguments():
    mesh = mesh_of((4,))
    x, w = (make(v, mesh, [Shard(0)], requires_grad=True) for v in (values()[0], values()[0] + 1))
    loss = (x * w).sum()
    loss.backward(retain_graph=True, inputs=[x])
    assert w.grad is None
    torch.autograd.backward([loss, (x * 2).sum()])
    torch.testing.assert_close(x.grad.full_tensor(), 2 * (values()[0] + 1) + 2)
    torch.testing.assert_close(w.grad.full_tensor(), values()[0])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.ranks(4)
def test_autograd_grad_takes_its_arguments():
    mesh = mesh_of((4,))
    x, w, unused = (make(values()[0], mesh, [p], requires_grad=True) for p in (Shard(0), Replicate(), Shard(1)))
    y = x * w
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(y.sum(), [x, unused], retain_graph=True)
    gradients = torch.autograd.grad(y.sum(), [x, unused], allow_unused=True, retain_graph=True)
    assert gradients[1] is None
    gradients = torch.autograd.grad(y.sum(), [x, unused], materialize_grads=True, retain_graph=True)
    assert gradients[1].placements == (Shard(1),)
    assert torch.equal(gradients[1].full_tensor(), torch.zeros(5, 3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad([y, y.sum()], x, grad_outputs=[make(values()[0], mesh, [Shard(1)]), None])
    torch.testing.assert_close(gradient.full_tensor(), (values()[0] + 1) * values()[0])
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(x * 2, x, grad_outputs=x.detach(), is_grads_batched=True)


@pytest.mark.ranks(4)
def test_plain_losses_reach_dtensor_parameters():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    loss = (x * x).sum().full_tensor()
    assert type(loss) is torch.Tensor
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(gradient.full_tensor(), 2 * values()[0])
    loss.backward(inputs=[x])
    torch.testing.assert_close(x.grad.full_tensor(), 2 * values()[0])


# -- .grad --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_grad_has_the_layout_of_the_parameter():
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()]):
        x = make(values()[0], mesh_of((2, 2)), placements, requires_grad=True)
        (
            x * make(values()[0], mesh_of((2, 2)), [Shard(0), Replicate()]).redistribute(placements=placements)
        ).sum().backward()
        assert x.grad.layout is x.layout
        assert x.grad is x.grad
        assert not x.grad.requires_grad
        torch.testing.assert_close(x.grad.full_tensor(), values()[0])


@pytest.mark.ranks(4)
def test_grad_can_be_set_changed_in_place_and_deleted():
    mesh = mesh_of((4,))
    x = make(values()[0], mesh, [Shard(0)], requires_grad=True)
    x.grad = make(values()[0], mesh, [Replicate()])
    assert x.grad.placements == (Shard(0),)
    x.grad.mul_(2)
    (x * 1).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * values()[0] + 1)
    same = make(values()[0], mesh, [Shard(0)])
    x.grad = same
    assert x.grad is same
    x.grad = None
    assert x.grad is None
    x.grad = same
    del x.grad
    assert x.grad is None
    with pytest.raises(TypeError, match="got Tensor of shape"):
        x.grad = torch.zeros(5, 3)
    with pytest.raises(ValueError, match="of shape"):
        x.grad = make(values()[2], mesh, [Shard(0)])


@pytest.mark.ranks(4)
def test_non_leaves_keep_their_gradient_when_asked():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    y = x * 2
    y.retain_grad()
    assert y.retains_grad
    (y * y).sum().backward()
    assert y.grad.placements == (Shard(0),)
    torch.testing.assert_close(y.grad.full_tensor(), 4 * values()[0])


# -- hooks --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()])
def test_register_hook_sees_and_replaces_the_gradient(placement):
    mesh, value = mesh_of((4,)), values()[0]
    x = make(value, mesh, [placement], requires_grad=True)
    y = x * 2
    seen = []

    def hook(gradient):
        seen.append(gradient)
        return make(10 * gradient.full_tensor(), mesh, [Shard(1)])  # in whatever layout

    handle = y.register_hook(hook)
    (y * make(value, mesh, [Replicate()])).sum().backward()
    assert [g.placements for g in seen] == [y.grad_placements]
    torch.testing.assert_close(seen[0].full_tensor(), value)
    torch.testing.assert_close(x.grad.full_tensor(), 20 * value)
    handle.remove()
    (y.detach() * x).sum().backward()
    assert len(seen) == 1


@pytest.mark.ranks(4)
def test_hooks_of_a_varying_tensor_see_a_pending_sum():
    mesh, value = mesh_of((4,)), values()[0]
    x = make(value, mesh, [Shard(0)], requires_grad=True)
    y = x.redistribute(placements=[Replicate()], grad_placements=[Partial()])
    seen = []
    y.register_hook(seen.append)
    (y * make(value, mesh, [Shard(1)])).sum().backward()
    assert seen[0].placements == (Partial(),)
    torch.testing.assert_close(seen[0].full_tensor(), value)
    torch.testing.assert_close(x.grad.full_tensor(), value)


@pytest.mark.ranks(4)
def test_a_hook_that_returns_a_plain_tensor_is_refused():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    x.register_hook(lambda gradient: gradient.to_local())
    with pytest.raises(TypeError, match="hook"):
        (x * 2).sum().backward()


@pytest.mark.ranks(4)
def test_post_accumulate_hooks_get_the_parameter_itself():
    x = torch.nn.Parameter(make(values()[0], mesh_of((4,)), [Shard(0)]))
    seen = []

    def step(parameter):
        seen.append((parameter is x, parameter.grad.full_tensor().clone()))
        parameter.grad = None

    handle = x.register_post_accumulate_grad_hook(step)
    (x * 3).sum().backward()
    assert [same for same, _ in seen] == [True]
    assert torch.equal(seen[0][1], torch.full((5, 3), 3.0, dtype=torch.float64))
    assert x.grad is None
    handle.remove()
    (x * 3).sum().backward()
    assert len(seen) == 1


@pytest.mark.ranks(4)
def test_multi_grad_hooks_fire_once():
    x, w = (make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True) for _ in range(2))
    seen = []
    torch.autograd.graph.register_multi_grad_hook([x, w], lambda grads: seen.append(grads))
    (x * w).sum().backward()
    assert len(seen) == 1
    assert all(isinstance(g, DTensor) for g in seen[0])
    torch.testing.assert_close(seen[0][0].full_tensor(), values()[0])


# -- grad mode, threads, memory -----------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_no_grad_and_inference_mode_make_no_graph():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    with torch.no_grad():
        y = x * 2
    assert (y.requires_grad, y.is_leaf) == (False, True)
    with torch.inference_mode():
        z = x * 2
        assert z.is_inference()
    assert not z.requires_grad
    torch.testing.assert_close(z.full_tensor(), 2 * values()[0])
    with torch.no_grad(), torch.enable_grad():
        assert (x * 2).requires_grad
    with torch.set_grad_enabled(False):
        assert not (x * 2).requires_grad


@pytest.mark.ranks(4)
def test_saved_tensor_hooks_see_the_local_tensors():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(type(t)) or t, lambda t: t):
        loss = (x * x).sum()
    loss.backward()
    assert set(packed) == {torch.Tensor}
    torch.testing.assert_close(x.grad.full_tensor(), 2 * values()[0])


@pytest.mark.ranks(4)
def test_reading_a_loss_does_not_disturb_a_later_backward():
    x = make(values()[0], mesh_of((4,)), [Shard(0)], requires_grad=True)
    loss = (x * x).sum()
    with torch.no_grad():
        number = loss.item()
    assert number == pytest.approx(float((values()[0] ** 2).sum()))
    assert float(loss) == number
    torch.log(loss).backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * values()[0] / number)


@pytest.mark.ranks(4)
def test_operators_and_backward_work_in_another_thread():
    tensors = place("column parallel")
    failures = []

    def work():
        try:
            loss_of(*tensors).backward()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    check([t.grad for t in tensors], tensors, expected_gradients())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", PLACED)
def test_nothing_of_a_step_stays_alive_after_it(layout):
    """With the cycle collector off: memory that waits for it is memory that is missing on a GPU."""
    tensors = place(layout)
    loss_of(*tensors).backward()  # caches are filled
    gc.collect()
    gc.disable()
    try:
        x, w, b = tensors
        product = x @ w
        hidden = torch.tanh(product + b)
        hidden.register_hook(lambda gradient: gradient * 1)
        moved = hidden.redistribute(placements=[Replicate(), Replicate()])
        loss = (moved * hidden).sum()
        loss.backward()
        alive = [weakref.ref(t._local) for t in (product, hidden, moved, loss)]
        alive += [weakref.ref(t) for t in (product, hidden, moved, loss)]
        del product, hidden, moved, loss
        assert [r() for r in alive] == [None] * len(alive)
        parameter = torch.nn.Parameter(make(values()[0], mesh_of((2, 2)), [Shard(0), Shard(1)]))
        parameter.register_post_accumulate_grad_hook(lambda p: None)
        (parameter * 2).sum().backward()
        alive = [weakref.ref(parameter), weakref.ref(parameter._local), weakref.ref(parameter.grad._local)]
        del parameter
        assert [r() for r in alive] == [None] * len(alive)
    finally:
        gc.enable()
