"""torch.optim, gradient clipping and GradScaler on DTensor parameters equal one device."""

import math

import pytest
import torch
from torch import nn

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, redistribute_policy
from hyper_parallel.comm.trace import CommTrace
from hyper_parallel.plugins import OpTable

SHAPES = [(5, 6), (7,), (1, 4), (), (3, 2, 2)]
PLACEMENTS = [
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
    [Shard(1), Shard(0)],
    [Replicate(), Replicate()],
    [Shard(0), Shard(0)],
]
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw-foreach": (torch.optim.AdamW, {"weight_decay": 0.1, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    "adam-amsgrad-foreach": (torch.optim.Adam, {"amsgrad": True, "foreach": True, "maximize": True}),
    "adam-amsgrad-fused": (torch.optim.Adam, {"amsgrad": True, "fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd-foreach": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    "sgd-fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"foreach": True}),
    "adadelta": (torch.optim.Adadelta, {"foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": True, "centered": True, "momentum": 0.5}),
    "nadam": (torch.optim.NAdam, {"foreach": True}),
    "radam": (torch.optim.RAdam, {"foreach": False}),
    "adamax": (torch.optim.Adamax, {"foreach": True}),
}


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters(mesh):
    """The same parameters on one device and on the mesh."""
    plain = [nn.Parameter(v.clone()) for v in values(0)]
    spread = [nn.Parameter(distribute_tensor(v, mesh, p)) for v, p in zip(values(0), PLACEMENTS, strict=True)]
    return plain, spread


def give_gradients(plain, spread, seed, scale=1.0):
    for p, d, g in zip(plain, spread, values(seed), strict=True):
        p.grad = g * scale
        d.grad = distribute_tensor(g * scale, d.device_mesh, d.placements)


def same(plain, spread):
    return [bool(torch.allclose(d.detach().full_tensor(), p.detach())) for p, d in zip(plain, spread, strict=True)]


def three_steps(name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, spread = parameters(mesh)
    kind, options = OPTIMIZERS[name]
    optimizers = [kind(p, lr=0.05, **options) for p in (plain, spread)]
    events = []
    for step in range(3):
        give_gradients(plain, spread, 10 + step)
        with CommTrace() as trace:
            for optimizer in optimizers:
                optimizer.step()
        events += trace.events
    kept = [tuple(d.placements) == tuple(p) for d, p in zip(spread, PLACEMENTS, strict=True)]
    return same(plain, spread), kept, events


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_one_device(ranks, name):
    for equal, kept, events in ranks(4, three_steps, name):
        assert all(equal)
        assert all(kept)
        assert not events


def clipped(norm_type, foreach):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, spread = parameters(mesh)
    give_gradients(plain, spread, 3)
    want = nn.utils.clip_grad_norm_(plain, 0.5, norm_type, foreach=foreach)
    with CommTrace() as trace:
        got = nn.utils.clip_grad_norm_(spread, 0.5, norm_type, foreach=foreach)
        got.item()  # as a training loop logs it
    grads = same([p.grad for p in plain], [d.grad for d in spread])
    return torch.allclose(got.full_tensor(), want), grads, dict(trace.counts)


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_clipping_costs_one_all_reduce(ranks, norm_type, foreach):
    for norm, grads, counts in ranks(4, clipped, norm_type, foreach):
        assert norm
        assert all(grads)
        assert counts == {"all_reduce": 1}


def scaled_step(bad_rank, options):
    """One step with GradScaler; one rank may hold an inf."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, spread = parameters(mesh)
    optimizer = torch.optim.AdamW(spread, lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(spread[3] * 1.0)  # makes the scaler's tensors
    before = [p.detach().clone() for p in plain]
    give_gradients(plain, spread, 4, 8.0)
    if torch.distributed.get_rank() == bad_rank:
        spread[0].grad.to_local()[0, 0] = math.inf
    with CommTrace() as trace:
        scaler.step(optimizer)
        scaler.update()
    reference = torch.optim.AdamW(plain, lr=0.1)
    for p in plain:
        p.grad /= 8
    reference.step()
    wanted = before if bad_rank is not None else plain
    return same(wanted, spread), scaler.get_scale(), dict(trace.counts)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_an_inf_on_one_rank_stops_all(ranks, bad_rank, options):
    for equal, scale, counts in ranks(4, scaled_step, bad_rank, options):
        assert all(equal)
        assert scale == (16.0 if bad_rank is None else 4.0)
        assert counts == {"all_reduce": 1}


def lists():
    """Forms that no optimizer uses: pending gradients, gradients through lists, mismatched layouts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    a, b = values(1)[0], values(2)[0]
    left = distribute_tensor(a, mesh, [Shard(0), Replicate()]).requires_grad_()
    whole = distribute_tensor(b, mesh, [Replicate(), Replicate()])
    pending = DTensor.from_local(b / 4, mesh, [Partial(), Partial()])
    seen = {}
    with torch.no_grad():
        seen["pending partner"] = torch._foreach_mul([left], [pending])[0]
        seen["whole partner"] = torch._foreach_add([left], [whole], alpha=2)[0]
        target = pending.clone()
        torch._foreach_mul_([target], 2.0)
        seen["pending target"] = target
        tall = distribute_tensor(b, mesh, [Shard(1), Replicate()])
        with pytest.raises(ValueError, match="fix: redistribute"):
            torch._foreach_add([left], [tall])
        with redistribute_policy("auto"):
            seen["auto"] = torch._foreach_add([left], [tall])[0]
        for scalars in (0.5, [0.5], torch.tensor([0.5])):
            seen[f"sum of products, {scalars}"] = torch._foreach_addcmul([pending], [whole], [whole], scalars)[0]
        maximum = left.detach().clone()
        torch._foreach_maximum_([maximum], [whole])
        seen["maximum"] = maximum
    product = torch._foreach_mul([left, left], [whole, 3.0])
    (product[0].sum() + product[1].sum()).backward()
    seen["gradient"] = left.grad
    want = [a * b, a + 2 * b, 2 * b, a + b, *[b + b * b / 2] * 3, torch.maximum(a, b), b + 3]
    return {
        name: bool(torch.allclose(v.detach().full_tensor(), w)) for (name, v), w in zip(seen.items(), want, strict=True)
    }


def test_lists(ranks):
    for seen in ranks(4, lists):
        assert all(seen.values()), seen


FOREACH = sorted(
    entry.name
    for table in OpTable.all_in_package("hyper_parallel_ops_basic", "tables")
    for entry in table.entries()
    if entry.class_name == "Foreach"
)


def on_lists(name):
    """The function of lists on one device and on the mesh, out of place and in place; what differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # Inside the domain of all functions.
    given = [[torch.sigmoid(v) * 0.8 + 0.1 for v in values(seed)] for seed in (1, 2, 3)]
    wrong = []
    for form in {name.rstrip("_"), f"{name.rstrip('_')}_"}:
        function = getattr(torch, form, None)
        for arguments in (given, given[:2], given[:1], (given[0], 2.0)) if function is not None else ():
            plain, spread = (
                [[make(v) for v, make in zip(a, how, strict=True)] if isinstance(a, list) else a for a in arguments]
                for how in ([torch.clone] * len(SHAPES), [laid_out(mesh, p) for p in PLACEMENTS])
            )
            try:
                wants = function(*plain)
            except (TypeError, RuntimeError):
                continue
            got = function(*spread)
            in_place = form.endswith("_") and not all(g is s for g, s in zip(got, spread[0], strict=True))
            if in_place or not all(same(wants, got)) or [d.placements for d in got] != [tuple(p) for p in PLACEMENTS]:
                wrong.append((form, len(arguments)))
            break
        else:
            assert function is None, f"no arguments for {form}"
    return wrong


def laid_out(mesh, placements):
    return lambda value: distribute_tensor(value, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize("name", FOREACH)
def test_function_of_lists(ranks, name):
    assert ranks(4, on_lists, name) == [[]] * 4
