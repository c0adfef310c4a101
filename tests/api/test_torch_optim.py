"""``torch.optim``, gradient clipping, ``GradScaler`` and autocast on DTensor parameters."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._foreach_utils import _has_foreach_support

from hyper_parallel import CommTrace, DTensor, Partial, Replicate, Shard, redistribute_policy
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make

SHAPES = [(5, 3), (3, 6), (6,), ()]
PLACEMENTS = [
    [Shard(0), Replicate()],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Replicate()],
]


def values(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in SHAPES]


def parameters(dtype=torch.float64):
    """The same parameters plain and on a mesh."""
    plain = [nn.Parameter(v) for v in values(dtype)]
    placed = [nn.Parameter(make(v, mesh_of((2, 2)), p)) for v, p in zip(values(dtype), PLACEMENTS, strict=True)]
    return plain, placed


def closure_of(tensors, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(tensors, 0)
        loss.backward()
        return loss

    return closure


def loss_of(tensors, step):
    x, w, b, s = tensors
    hidden = torch.tanh(
        x.redistribute(placements=[Shard(0), Replicate()]) @ w.redistribute(placements=[Replicate()] * 2)
        if isinstance(x, DTensor)
        else x @ w
    )
    bias = b.redistribute(placements=[Replicate()] * 2) if isinstance(b, DTensor) else b
    return ((hidden + bias) * s).square().mean() * (1.0 + step)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
}
# They redistribute, or need tensors of two dimensions; each is compared in its default form.
OTHERS = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "Adafactor foreach": (torch.optim.Adafactor, {"lr": 0.1, "foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "LBFGS": (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe", "max_iter": 3}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
}
FORMS = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_one_device_and_send_nothing(name, form):
    kind, options = OPTIMIZERS[name]
    plain, placed = parameters()
    ours, theirs = kind(placed, **options, **FORMS[form]), kind(plain, **options, **FORMS[form])
    for step in range(3):
        for optimizer, tensors in ((theirs, plain), (ours, placed)):
            optimizer.zero_grad()
            loss_of(tensors, step).backward()
            with CommTrace() as trace:
                optimizer.step()
            assert not trace.events
    for got, want in zip(placed, plain, strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach())
        for key, state in ours.state[got].items():
            if state.ndim:
                assert state.placements == got.placements, key
                torch.testing.assert_close(state.full_tensor(), theirs.state[want][key])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_optimizers_step_as_on_one_device(name):
    kind, options = OTHERS[name]
    plain, placed = parameters()
    with redistribute_policy("auto"):
        for tensors in (plain, placed):
            optimizer = kind(tensors, **options)

            for _ in range(3):
                optimizer.step(closure_of(tensors, optimizer))
    for got, want, layout in zip(placed, plain, PLACEMENTS, strict=True):
        assert list(got.placements) == layout
        torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(4)
def test_muon_steps_as_on_one_device():
    plain, placed = (tensors[:2] for tensors in parameters(torch.float32))
    with redistribute_policy("auto"):
        for tensors in (plain, placed):
            optimizer = torch.optim.Muon(tensors, lr=0.01)
            for tensor, value in zip(tensors, values(torch.float32), strict=False):
                tensor.grad = value if tensors is plain else make(value, mesh_of((2, 2)), tensor.placements)
            optimizer.step()
    for got, want in zip(placed, plain, strict=True):  # computed in bfloat16
        torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-2, atol=1e-3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("multi", [True, False])
def test_averaged_models_average_as_on_one_device(multi):
    averages = []
    for tensors in parameters():
        model = nn.ParameterList(tensors)
        how = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if multi else {}
        average = AveragedModel(model, **how)
        for _ in range(3):
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(1.5)
            average.update_parameters(model)
        averages.append(list(average.parameters()))
    for want, got in zip(*averages, strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach())


@pytest.mark.ranks(4)
def test_a_closure_and_parameter_groups():
    plain, placed = parameters()
    for tensors in (plain, placed):
        groups = [{"params": tensors[:2], "lr": 0.05}, {"params": tensors[2:], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        for _ in range(2):
            optimizer.step(closure_of(tensors, optimizer))
            scheduler.step()
    for got, want in zip(placed, plain, strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", ["for-loop", "foreach", "fused"])
def test_optimizer_state_survives_a_state_dict(form):
    def train(optimizer, tensors, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(tensors, step).backward()
            optimizer.step()

    _, straight = parameters()
    train(torch.optim.AdamW(straight, lr=0.1, **FORMS[form]), straight, range(4))
    _, first = parameters()
    optimizer = torch.optim.AdamW(first, lr=0.1, **FORMS[form])
    train(optimizer, first, range(2))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = torch.optim.AdamW(second, lr=0.5, **FORMS[form])
    resumed.load_state_dict(optimizer.state_dict())
    train(resumed, second, range(2, 4))
    for got, want in zip(second, straight, strict=True):
        assert torch.equal(got.detach().full_tensor(), want.detach().full_tensor())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, float("inf")])
def test_clip_grad_norm_clips_by_the_global_norm(norm_type, foreach):
    plain, placed = parameters()
    totals = []
    for tensors in (plain, placed):
        loss_of(tensors, 9).backward()
        totals.append(nn.utils.clip_grad_norm_(tensors, 0.1, norm_type=norm_type, foreach=foreach))
    total = totals[1].full_tensor() if isinstance(totals[1], DTensor) else totals[1]
    torch.testing.assert_close(total, totals[0])
    assert total > 0.1
    for got, want in zip(placed, plain, strict=True):
        assert got.grad.placements == got.placements
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("foreach", [None, True])
def test_norms_and_clipping_by_value(foreach):
    plain, placed = parameters()
    for tensors in (plain, placed):
        loss_of(tensors, 9).backward()
    norms = [nn.utils.get_total_norm([t.grad for t in tensors], foreach=foreach) for tensors in (plain, placed)]
    torch.testing.assert_close(norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1], norms[0])
    for tensors in (plain, placed):
        nn.utils.clip_grad_value_(tensors, 0.01, foreach=foreach)
    for got, want in zip(placed, plain, strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)
    assert float(norms[1]) == pytest.approx(float(norms[0]))


@pytest.mark.ranks(4)
def test_a_total_norm_that_is_not_finite_is_an_error_on_all_ranks():
    _, placed = parameters()
    loss_of(placed, 0).backward()
    with torch.no_grad():
        if torch.distributed.get_rank() >= 2:  # the two ranks that hold the same rows
            placed[0].grad.to_local().fill_(float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(placed, 1.0, error_if_nonfinite=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", ["for-loop", "foreach", "fused"])
def test_grad_scaler_steps_like_one_device(form):
    plain, placed = parameters(torch.float32)
    for tensors in (plain, placed):
        optimizer = torch.optim.AdamW(tensors, lr=0.1, **FORMS[form])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(tensors, step)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(tensors, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2048.0
    for got, want in zip(placed, plain, strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("where", [0, 3])
def test_an_inf_on_one_rank_skips_the_step_on_all(form, where):
    _, placed = parameters(torch.float32)
    optimizer = torch.optim.AdamW(placed, lr=0.1, **FORMS[form])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.detach().full_tensor() for p in placed]
    scaler.scale(loss_of(placed, 0)).backward()
    with torch.no_grad():
        if torch.distributed.get_rank() == where:
            placed[0].grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for parameter, old in zip(placed, before, strict=True):
        assert torch.equal(parameter.detach().full_tensor(), old)
    optimizer.zero_grad()
    scaler.scale(loss_of(placed, 0)).backward()
    scaler.step(optimizer)
    assert not torch.equal(placed[0].detach().full_tensor(), before[0])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("of_x", "of_w"),
    [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Replicate())],
    ids=str,
)
def test_autocast_chooses_the_dtypes_of_one_device(of_x, of_w):
    value, weight = (v.float() for v in values()[:2])
    mesh = mesh_of((4,))

    def step(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = x @ w
            kept = torch.nn.functional.linear(x, w.t())
            summed = product.float().sum() + (kept * kept).float().mean()
        summed.backward()
        return product, summed

    plain = [value.clone().requires_grad_(), weight.clone().requires_grad_()]
    product, summed = step(*plain)
    tensors = [make(value, mesh, [of_x], requires_grad=True), make(weight, mesh, [of_w], requires_grad=True)]
    dproduct, dsummed = step(*tensors)
    assert dproduct.dtype == product.dtype == torch.bfloat16
    assert dsummed.dtype == summed.dtype == torch.float32
    # A contraction over ranks adds up terms that were rounded to bfloat16 each.
    torch.testing.assert_close(dproduct.detach().full_tensor(), product.detach(), rtol=2e-2, atol=2e-2)
    for got, want in zip(tensors, plain, strict=True):
        assert got.grad.dtype == torch.float32
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=2e-2, atol=5e-2)
    assert (tensors[0] @ tensors[1]).dtype == torch.float32  # outside again


@pytest.mark.ranks(4)
def test_pending_gradients_are_summed_before_the_optimizer_sees_them():
    """A parameter that is Replicate on a data axis has one gradient, the sum over the ranks."""
    value = values()[0]
    parameter = nn.Parameter(make(value, mesh_of((4,)), [Replicate()]))
    batch = make(torch.arange(20.0, dtype=torch.float64).reshape(4, 5), mesh_of((4,)), [Shard(0)])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    (batch @ parameter).sum().backward()
    assert parameter.grad.placements == (Replicate(),)
    optimizer.step()
    column = torch.arange(20.0, dtype=torch.float64).reshape(4, 5).sum(0)
    torch.testing.assert_close(parameter.detach().full_tensor(), value - column[:, None])
    assert Partial() not in parameter.placements


@pytest.mark.ranks(4)
def test_optimizers_choose_foreach_for_dtensors_where_they_do_for_plain_tensors():
    for tensors in parameters():
        assert _has_foreach_support([t.detach() for t in tensors], torch.device("cpu"))
        assert all(type(t) in _foreach_supported_types for t in tensors)
