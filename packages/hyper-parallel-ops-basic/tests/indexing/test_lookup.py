"""log_softmax over sharded classes, then a lookup of the targets' scores: right whatever happens in between.

And what it costs: two all-reduces forward, of log_softmax; the result is a pending sum. None backward, unless what the
lookup noted of its gradient no longer holds.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import CommTrace, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel_ops_basic.indexing.lookup import _notes

R = Replicate()
ROWS, CLASSES = 8, 13  # uneven over 2 and over 4
TARGET = torch.tensor([3, -100, 0, 12, -100, 7, 5, 11])
EVERY = TARGET.clamp(min=0)
WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)


def mesh_of(name):
    if name == "tp":
        return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


# mesh, placements of the scores
LAYOUTS = {
    "tp": ("tp", [Shard(1)]),
    "dp x tp": ("dp x tp", [R, Shard(1)]),
    "batch too": ("dp x tp", [Shard(0), Shard(1)]),
    "classes twice": ("dp x tp", [Shard(1), Shard(1)]),
}


def scores_of(classes=CLASSES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(ROWS, classes, dtype=torch.float64, generator=generator) * 3).to(dtype)


def place(value, layout, *, like=(0,)):
    """A tensor whose dims are those of the scores that ``like`` names."""
    name, placements = LAYOUTS[layout]
    kept = [Shard(like.index(p.dim)) if p.is_shard() and p.dim in like else R for p in placements]
    return distribute_tensor(value, mesh_of(name), kept, src_data_rank=None)


def seed_of(loss):
    """Distinct gradients of the losses."""
    return torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(tuple(loss.shape))


def both(function, layout="batch too", scores=None):
    """Of one device and of ranks: the scores and ``function(scores, place)``. And how many all-reduces it cost."""
    value = scores_of() if scores is None else scores
    plain = value.clone().requires_grad_()
    spread = place(value, layout, like=range(value.ndim)).requires_grad_()
    want = function(plain, lambda tensor, **_: tensor)
    with CommTrace() as trace:
        found = function(spread, lambda tensor, **options: place(tensor, layout, **options))
    return (plain, want), (spread, found), trace.counts["all_reduce"]


def check(loss_of, backward, layout="batch too", scores=None):
    """Values and gradients are those of one device; the backward costs so many all-reduces. Returns the loss of the
    ranks, and what the forward cost."""
    (plain, want), (spread, loss), forward = both(loss_of, layout, scores)
    torch.testing.assert_close(loss.full_tensor(), want, equal_nan=True)
    want.backward(seed_of(want))
    with CommTrace() as trace:
        loss.backward(seed_of(want))
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad, equal_nan=True)
    assert backward is None or dict(trace.counts) == ({"all_reduce": backward} if backward else {})
    return loss, forward


# options of the loss, and small all-reduces beside those of log_softmax: [classes sharded, batch too]
LOSSES = {
    "mean": ({}, 0, 1),
    "sum": ({"reduction": "sum"}, 0, 1),  # on the CPU: whether some rank has a target that is no class
    "none": ({"reduction": "none"}, 0, 1),
    "an ignored class": ({"ignore_index": 7, "target": EVERY}, 0, 1),
    "nothing counts": ({"target": torch.full((ROWS,), -100)}, 0, 1),
    "weight": ({"weight": WEIGHT}, 0, 1),
    "weight, none": ({"weight": WEIGHT, "reduction": "none"}, 0, 1),
    "sharded weight": ({"weight": WEIGHT}, 1, 2),
    "gather": (None, 0, 0),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", LOSSES)
def test_two_all_reduces_forward_and_none_backward(name):
    options, classes, with_batch = LOSSES[name]
    of_weight = (1,) if name == "sharded weight" else ()

    def loss_of(scores, at):
        logp = F.log_softmax(scores, 1)
        if options is None:
            return logp.gather(-1, at(EVERY.unsqueeze(1))).squeeze(-1)
        given = dict(options)
        target = at(given.pop("target", TARGET))
        if "weight" in given:
            given["weight"] = at(WEIGHT, like=of_weight)
        return F.nll_loss(logp, target, **given)

    for layout, (_, placements) in LAYOUTS.items():
        loss, forward = check(loss_of, 0, layout)
        assert forward == 2 + (with_batch if layout == "batch too" else classes)
        assert all(isinstance(loss.placements[axis], Partial) for axis, p in enumerate(placements) if p == Shard(1))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("classes", [1, 2, 5, 12])  # ranks without a class
def test_any_number_of_classes(classes):
    target = TARGET.where(TARGET < 0, TARGET % classes)
    for layout in LAYOUTS:
        check(lambda scores, at: F.nll_loss(F.log_softmax(scores, 1), at(target)), 0, layout, scores_of(classes))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_positions_and_low_precision(dtype):
    """Classes in the middle: (batch, classes, sequence)."""
    value = scores_of().view(2, 4, CLASSES).transpose(1, 2).contiguous().to(dtype)
    check(
        lambda scores, at: F.nll_loss(F.log_softmax(scores, 1), at(TARGET.view(2, 4)), reduction="sum"), 0, scores=value
    )


def nll(logp, at, target=TARGET):
    return F.nll_loss(logp, at(target), reduction="sum")


def hooked(hook):
    def loss_of(scores, at):
        logp = F.log_softmax(scores, 1)
        logp.register_hook(hook)
        return nll(logp, at)

    return loss_of


def hooked_on_one_rank(scores, at):
    logp = F.log_softmax(scores, 1)
    if not torch.distributed.get_rank():
        logp.register_hook(lambda grad: None)
    return nll(logp, at)


def doubled_copy(grad):
    """As a copy with its attributes, written to once, as the gradient itself was."""
    made = copy.deepcopy(grad)
    made *= 2
    return made


def two_uses(scores, at):
    logp = F.log_softmax(scores, 1)
    return nll(logp, at) + 3 * nll(logp, at, EVERY)


def a_use_before(scores, at):
    logp = F.log_softmax(scores, 1)
    return (logp.exp() ** 2).sum() + nll(logp, at)


def a_use_after(scores, at):
    logp = F.log_softmax(scores, 1)
    return nll(logp, at) + (logp.exp() ** 2).sum()


def writes(grad):
    grad *= 2


def writes_to_a_view(grad):
    grad.view(2, 4, CLASSES).mul_(2)


# a loss, and the all-reduces of its backward
BETWEEN = {
    "nothing": (lambda s, at: nll(F.log_softmax(s, 1), at), 0),
    "a hook that looks": (hooked(lambda grad: None), 0),
    "a hook that gives a new gradient": (hooked(lambda grad: grad * 2), 1),
    "a hook that writes": (hooked(writes), 1),
    "a hook that looks, on one rank": (hooked_on_one_rank, 0),
    "a hook that writes to a view": (hooked(writes_to_a_view), 1),
    "a hook that changes a copy": (hooked(doubled_copy), 1),
    "two lookups": (two_uses, 1),
    "another use before": (a_use_before, None),
    "another use after": (a_use_after, None),
    "a cast": (lambda s, at: nll(F.log_softmax(s, 1).float(), at).double(), 1),
    "a view": (lambda s, at: nll(F.log_softmax(s, 1).view(2, 4, CLASSES).flatten(0, 1), at), 1),
    "a product": (lambda s, at: nll(F.log_softmax(s, 1) * 2, at), 1),
    "after the lookup": (lambda s, at: nll(F.log_softmax(s, 1), at) ** 2 * 3, 0),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", BETWEEN)
def test_what_happens_between(name):
    check(*BETWEEN[name])


@pytest.mark.ranks(4)
def test_classes_that_are_not_the_dim_of_the_softmax():
    """Both dims are sharded; the sums along one are not those along the other."""
    value = scores_of().view(2, 4, CLASSES)
    target = EVERY.repeat(4)[: 2 * CLASSES].view(2, CLASSES) % 4

    def loss_of(scores, at):
        return F.nll_loss(F.log_softmax(scores, 2), at(target, like=(0, 2)))

    LAYOUTS["two dims"] = ("dp x tp", [Shard(1), Shard(2)])
    check(loss_of, 1, "two dims", value)


@pytest.mark.ranks(4)
def test_gradients_of_the_log_probabilities():
    """Kept, asked for, and given back: as they are, and changed in place."""

    def steps(scores, at):
        logp = F.log_softmax(scores, 1)
        logp.retain_grad()
        loss = nll(logp, at)
        (kept,) = torch.autograd.grad(loss, logp, retain_graph=True)
        found = [kept.clone(), *torch.autograd.grad(logp, scores, kept, retain_graph=True)]
        kept *= 2
        found += torch.autograd.grad(logp, scores, kept, retain_graph=True)
        for _ in range(2):
            loss.backward(retain_graph=True)
        return [*found, logp.grad, scores.grad]

    (_, want), (_, found), _ = both(steps)
    for expected, given in zip(want, found, strict=True):
        torch.testing.assert_close(given.full_tensor(), expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["nothing", "two lookups", "a use before", "after the lookup"])
def test_second_derivatives(name):
    loss_of = a_use_before if name == "a use before" else BETWEEN[name][0]

    def second(scores, at):
        (first,) = torch.autograd.grad(loss_of(scores, at), scores, create_graph=True)
        return torch.autograd.grad((first**3).sum(), scores)[0]

    for layout in LAYOUTS:
        (_, want), (_, found), _ = both(second, layout)
        torch.testing.assert_close(found.full_tensor(), want)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    def loss_of(scores, at):
        return checkpoint(lambda s: nll(F.log_softmax(s, 1), at), scores, use_reentrant=reentrant)

    check(loss_of, None)


@pytest.mark.ranks(4)
def test_a_backward_in_inference_mode():
    (plain, want), (spread, loss), _ = both(BETWEEN["nothing"][0])
    with torch.inference_mode():
        (expected,) = torch.autograd.grad(want, plain)
        (found,) = torch.autograd.grad(loss, spread)
        torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.ranks(4)
def test_a_label_that_is_no_class_raises_on_every_rank():
    for layout in LAYOUTS:
        for reduction in ("mean", "sum", "none"):
            logp = F.log_softmax(place(scores_of(), layout, like=(0, 1)), 1)
            for label in (CLASSES, -1):
                target = torch.where(torch.arange(ROWS) == 5, label, TARGET)  # of one part of the batch
                with pytest.raises(IndexError, match="out of bounds"):
                    F.nll_loss(logp, place(target, layout), reduction=reduction)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("create_graph", [False, True])
def test_what_was_noted_goes_with_the_gradient(create_graph):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    scores = distribute_tensor(scores_of(), mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    target = distribute_tensor(TARGET, mesh, [R], src_data_rank=None)
    before = len(_notes)
    logp = F.log_softmax(scores, 1)
    loss = F.nll_loss(logp, target) ** 2
    kept, first = torch.autograd.grad(loss, (logp, scores), create_graph=create_graph)
    assert len(_notes) == before + 1
    del kept
    if create_graph:
        (first**2).sum().backward()
    del logp, loss, first
    assert len(_notes) == before
