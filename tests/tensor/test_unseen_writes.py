"""A write that no version counter tells of is seen by the next forward: fused steps, collectives, NumPy, DLPack ..."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    SkipDTensorDispatch,
    custom_shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    redistribute_policy,
    shard_module,
)
from hyper_parallel.rules import remembered

R, P = Replicate(), Partial()


def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Mlp(nn.Module):
    """Two layers with biases; that of the second meets a pending sum, of which it becomes a term."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 4)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = numbers(*parameter.shape, seed=seed) / 3

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


def by_styles():
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return Mlp(), lambda model: parallelize_module(model, mesh(), plan), numbers(3, 8, seed=9)


def by_styles_of_dtensors():
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    return Mlp(), lambda model: parallelize_module(model, mesh(), plan), numbers(3, 8, seed=9)


def by_plan():
    plan = {"up.weight": [Shard(0)], "up.bias": [Shard(0)], "down.weight": [Shard(1)]}
    return Mlp(), lambda model: shard_module(model, mesh(), {"parameter": _layouts(plan)}), numbers(3, 8, seed=9)


def _layouts(plan):
    from hyper_parallel import Layout

    dims = {name: 2 if name.endswith("weight") else 1 for name in plan}
    return {name: Layout.from_placements(mesh(), p, ndim=dims[name]) for name, p in plan.items()}


def by_hand():
    def lay_out(name, module, mesh):
        for parameter, placement in {"up": (("weight", 0), ("bias", 0)), "down": (("weight", 1),)}.get(name, ()):
            value = getattr(module, parameter)
            spread = distribute_tensor(value, mesh, [Shard(placement)])
            module.register_parameter(parameter, nn.Parameter(spread))

    return Mlp(), lambda model: distribute_module(model, mesh(), lay_out, _replicated), numbers(3, 8, seed=9)


def _replicated(module, inputs, mesh):
    return tuple(distribute_tensor(x, mesh, [R]) for x in inputs)


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 16}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, attention_bias=True)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(numbers(*parameter.shape))
    plan = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan["model.layers.*.self_attn.o_proj"] = RowwiseParallel()
    return model, lambda model: parallelize_module(model, mesh(), plan), torch.tensor([[1, 5, 3, 2]])


MODELS = {
    "styles": by_styles,
    "styles, DTensors": by_styles_of_dtensors,
    "plan": by_plan,
    "by hand": by_hand,
    "llama": llama,
}
FORMS = {
    "SGD": [{"fused": True, "momentum": 0.9}, {"foreach": True}, {"foreach": False}],
    "Adam": [{"fused": True}, {"foreach": True}, {"foreach": False}],
    "AdamW": [{"fused": True}, {"foreach": True}, {"foreach": False}],
    "Adagrad": [{"fused": True}, {"foreach": True}, {"foreach": False}],
}


def value(model, x):
    out = model(x)
    out = getattr(out, "logits", out)
    return out.full_tensor() if isinstance(out, DTensor) else out


def losses(model, x, step, steps=3):
    """What training gives, with an evaluation before each step."""
    found = []
    for _ in range(steps):
        loss = value(model, x).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            found.append((loss.item(), value(model, x).sum().item()))
        step(model)
        for parameter in model.parameters():
            parameter.grad = None
    return torch.tensor(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_form_of_an_optimizer_trains_as_on_one_device(kind, name):
    for options in FORMS[name]:
        plain, spread, x = MODELS[kind]()
        model = spread(copy.deepcopy(plain))
        found = []
        for each in (model, plain):
            optimizer = getattr(torch.optim, name)(each.parameters(), lr=0.05, **options)
            found.append(losses(each, x, lambda _, optimizer=optimizer: optimizer.step()))
        torch.testing.assert_close(*found, msg=lambda text, options=options: f"{options}: {text}")


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def of_locals(kernel):
    """A step of code that is no ``torch.optim.Optimizer``, on the local tensors that it took once."""

    def step(model):
        held = [local(p) for p in model.parameters() if p.grad is not None]
        kernel(held, [local(p.grad) for p in model.parameters() if p.grad is not None])

    return step


def fused_kernel(parameters, grads):
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.05, "dampening": 0.0, "nesterov": False}
    torch._fused_sgd_([p.detach() for p in parameters], grads, [], **options, maximize=False, is_first_step=False)


def through_numpy(parameters, grads):
    for p, g in zip(parameters, grads, strict=True):
        p.detach().numpy()[...] -= 0.05 * g.numpy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kernel", [fused_kernel, through_numpy])
@pytest.mark.parametrize("kind", MODELS)
def test_steps_of_foreign_optimizers(kind, kernel):
    plain, spread, x = MODELS[kind]()
    model = spread(copy.deepcopy(plain))
    torch.testing.assert_close(losses(model, x, of_locals(kernel)), losses(plain, x, of_locals(kernel)))


def from_the_first_rank(p):
    """Half of it on the first rank, what others wrote there is lost: the collective is what writes."""
    piece = local(p)
    half = piece.detach() * 0.5
    if isinstance(p, DTensor) and p.placements == (R,):
        piece.detach().numpy()[...] = half.numpy() * (1 - dist.get_rank())
        dist.broadcast(piece.detach(), 0)
    else:
        piece.detach().numpy()[...] = half.numpy()


def summed(p):
    if not (isinstance(p, DTensor) and p.placements == (R,)):
        local(p).detach().numpy()[...] *= 0.5
        return
    local(p).detach().numpy()[...] *= 0.25
    dist.all_reduce(local(p).detach())


def by_other_memory(p):
    local(p).data = local(p).detach() * 0.5


def by_set(p):
    piece = local(p)
    piece.data.set_(piece.detach() * 0.5)
    with torch.no_grad():
        piece.set_(piece.detach() * 0.5)


def into_storage(p):
    local(p).untyped_storage().copy_((local(p).detach().contiguous() * 0.5).untyped_storage())


def through_dlpack(p):
    torch.from_dlpack(local(p).detach()).mul_(0.5)


def through_data(p):
    p.data.mul_(0.5)


def through_data_of_the_piece(p):
    local(p).data.mul_(0.5)


def through_foreach(p):
    torch._foreach_mul_([local(p).data], 0.5)


def by_other_data(p):
    p.data = p.data * 0.5


WRITES = [
    from_the_first_rank, summed, by_other_memory, by_set, into_storage, through_dlpack, through_data,
    through_data_of_the_piece, through_foreach, by_other_data,
]  # fmt: skip


def shown(model, x):
    with torch.no_grad():
        evaluated = value(model, x)
    return torch.stack([evaluated, value(model, x).detach()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", MODELS)
def test_every_write_to_the_parameters_is_seen_by_the_next_forward(kind):
    for write in WRITES:
        plain, spread, x = MODELS[kind]()
        model = spread(copy.deepcopy(plain))
        for _ in range(2):
            torch.testing.assert_close(shown(model, x), shown(plain, x), msg=lambda t, w=write: f"{w.__name__}: {t}")
            for p in model.parameters():
                write(p)
            with torch.no_grad():
                for p in plain.parameters():
                    p.mul_(0.5)
        if write is by_set:  # it writes twice
            continue
        torch.testing.assert_close(shown(model, x), shown(plain, x), msg=lambda t, w=write: f"{w.__name__}: {t}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", MODELS)
def test_averages_of_weights_come_and_go(kind):
    plain, spread, x = MODELS[kind]()
    model = spread(copy.deepcopy(plain))
    averages = {name: p.detach().clone() * 0.5 for name, p in model.named_parameters()}
    first = shown(model, x)
    own = {name: p.data for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = averages[name]
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(0.5)
    torch.testing.assert_close(shown(model, x), shown(plain, x))
    for name, p in model.named_parameters():
        p.data = own[name]
    torch.testing.assert_close(shown(model, x), first)
    model.load_state_dict({name: nn.Parameter(average) for name, average in averages.items()}, assign=True)
    torch.testing.assert_close(shown(model, x), shown(plain, x))


@pytest.mark.ranks(2)
def test_a_bare_function_of_a_parameter():
    """There is no call that would end what was computed of the parameter."""
    w, bias = numbers(4, 8), numbers(4, seed=1)
    x = distribute_tensor(numbers(3, 8, seed=2), mesh(), [Shard(1)])
    dw = distribute_tensor(w, mesh(), [Shard(1)]).requires_grad_()
    db, frozen = distribute_tensor(bias, mesh(), [R]).requires_grad_(), distribute_tensor(bias, mesh(), [Shard(0)])
    for _ in range(3):
        want = F.linear(numbers(3, 8, seed=2), w) + bias
        torch.testing.assert_close((F.linear(x, dw) + db).full_tensor(), want)
        with redistribute_policy("auto"):
            torch.testing.assert_close((F.linear(x, dw) + frozen).full_tensor(), want)
        for tensor in (dw, db, frozen):
            tensor.to_local().detach().numpy()[...] *= 2
        w, bias = w * 2, bias * 2


class Scores(nn.Module):
    """Uses one weight and one buffer, sharded where they are wanted whole, several times."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(numbers(4, 4))
        self.register_buffer("scale", numbers(4, 4, seed=1))

    def forward(self, x, times=2):
        out = x
        with redistribute_policy("auto"):
            for _ in range(times):
                out = out * self.weight + self.scale
        return out


@pytest.mark.ranks(2)
def test_what_is_gathered_of_leaves_serves_one_call():
    model, plain = Scores(), Scores()
    shard_module(model, mesh(), {"parameter": _layouts({"weight": [Shard(0)]})})
    model.scale = distribute_tensor(model.scale, mesh(), [Shard(0)])
    x = distribute_tensor(numbers(4, 4, 4, seed=2), mesh(), [Shard(0)])
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(value(model, x), plain(x.full_tensor()))
        counts = []
        for times in (1, 3):
            with CommTrace() as trace:
                out = model(x, times)
                out.sum().backward()
            torch.testing.assert_close(out.full_tensor(), plain(x.full_tensor(), times))
            counts.append(trace.counts)
        assert counts == [{"all_gather": 2, "reduce_scatter": 1}] * 2
        for piece in (model.weight.to_local(), model.scale.to_local()):
            piece.detach().numpy()[...] *= 2
        with torch.no_grad():
            plain.weight.mul_(2)
            plain.scale.mul_(2)


def handed(t):
    return t.to_local().detach().numpy()


def kept_by_a_custom_function(t):
    kept = []
    custom_shard(lambda piece: kept.append(piece) or piece * 1, mesh(), out_layouts=[P])(t)
    return kept[0].detach().numpy()


def by_skipping_the_dispatcher(t):
    with SkipDTensorDispatch():
        return t.detach().view(-1).numpy()


HANDED = {
    "to_local": handed,
    "data": lambda t: t.data.to_local().numpy(),
    "detach": lambda t: handed(t.detach()),
    "view": lambda t: handed(t.view(-1)),
    "gradient": lambda t: t.to_local(grad_placements=[R]).detach().numpy(),
    "to_torch": lambda t: t.to_torch().to_local().detach().numpy(),
    "custom_shard": kept_by_a_custom_function,
    "skip": by_skipping_the_dispatcher,
    "storage": lambda t: np.frombuffer(memoryview(t.to_local().detach().numpy()).cast("B"), dtype=np.float32),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("when", ["before", "between"])
def test_what_the_user_was_given_of_an_activation_is_not_remembered(grad, when):
    for name, give in HANDED.items():
        x = distribute_tensor(torch.ones(3, 4), mesh(), [Shard(1)]).requires_grad_(grad)
        w = distribute_tensor(torch.ones(2, 4), mesh(), [Shard(1)])
        h = F.linear(x, w)
        assert h.placements == (P,)
        memory = give(h) if when == "before" else None
        assert h.relu().tolist() == [[4.0] * 2] * 3
        memory = give(h) if memory is None else memory
        memory *= 2
        assert h.relu().tolist() == [[8.0] * 2] * 3, name
        assert (h.view(-1).relu() + h.view(-1).sigmoid() * 0).tolist() == [8.0] * 6, name


@pytest.mark.ranks(2)
def test_the_memory_of_a_remembered_form_can_be_given_too():
    h = F.linear(
        distribute_tensor(torch.ones(3, 4), mesh(), [Shard(1)]), distribute_tensor(torch.ones(2, 4), mesh(), [Shard(1)])
    )
    for memory in (lambda: h.reduce_partial().to_local().numpy(), lambda: h.reduce_partial().numpy()):
        memory()[...] = 0
        assert h.relu().tolist() == [[4.0] * 2] * 3


@pytest.mark.ranks(2)
def test_reading_numbers_gives_nothing_away():
    h = F.linear(
        distribute_tensor(torch.ones(3, 4), mesh(), [Shard(1)]), distribute_tensor(torch.ones(2, 4), mesh(), [Shard(1)])
    )
    with torch.no_grad(), CommTrace() as trace:
        assert h.tolist() == h.relu().tolist()
        assert repr(h)
        assert h.relu().sum().item() == 24
    assert trace.counts == {"all_reduce": 1}


@pytest.mark.ranks(2)
def test_a_tensor_that_from_local_took_stays_its_owners():
    memory = torch.ones(3)
    x = DTensor.from_local(memory, mesh(), [P])
    assert x.relu().tolist() == [2.0] * 3
    memory.numpy()[...] = 2
    assert x.relu().tolist() == [4.0] * 3
    parameter = nn.Parameter(torch.ones(3))
    x = DTensor.from_local(parameter, mesh(), [P])
    assert x.relu().tolist() == [2.0] * 3
    parameter.detach().numpy()[...] = 2
    assert x.relu().tolist() == [4.0] * 3


@pytest.mark.ranks(2)
def test_one_buffer_for_all_batches():
    plain = Mlp()
    model = parallelize_module(
        copy.deepcopy(plain), mesh(), {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel()}
    )
    batch = numbers(4, 8, seed=9)
    piece = batch.chunk(2)[dist.get_rank()].clone()
    for _ in range(3):
        torch.testing.assert_close(model(piece), plain(batch))
        torch.testing.assert_close(model.up(piece), plain.up(batch).chunk(2, -1)[dist.get_rank()])
        piece.numpy()[...] *= 2
        batch = batch * 2


@pytest.mark.ranks(2)
def test_a_sparse_gradient_can_be_taken():
    w = distribute_tensor(torch.ones(4, 3), mesh(), [R]).requires_grad_()
    w.to_local().grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (4, 3))
    assert w.grad.to_local().is_sparse


@pytest.mark.ranks(2)
def test_unscaling_a_gradient_is_a_write_to_it():
    w = distribute_tensor(torch.ones(4, 3), mesh(), [Shard(0)]).requires_grad_()
    (w * 6).sum().backward()
    whole = w.layout.replicated()
    assert remembered(w.grad, whole) is remembered(w.grad, whole)
    with torch.no_grad():
        torch._amp_foreach_non_finite_check_and_unscale_([w.grad], torch.zeros(1), torch.tensor(0.5))
    assert remembered(w.grad, whole).tolist() == [[3.0] * 3] * 4


@pytest.mark.ranks(2)
def test_a_write_by_foreach_to_a_redistributed_view_reaches_the_tensor():
    x = distribute_tensor(torch.ones(2, 4), mesh(), [Shard(0)])
    with redistribute_policy("auto"):
        row = x.unbind(0)[0]
        torch._foreach_mul_([row], 2.0)
    assert x.full_tensor().tolist() == [[2.0] * 4, [1.0] * 4]
