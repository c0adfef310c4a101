"""loss_parallel: what it refuses, what it takes, and that its losses are those of one device and of torch's."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    CommTrace,
    DTensor,
    FusedLinearCrossEntropyLoss,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    gather_tensor_parallel_logits,
    init_device_mesh,
    is_loss_parallel_active,
    loss_parallel,
    redistribute_policy,
)
from hyper_parallel.core import tensor_parallel

R = Replicate()
VOCABULARY = 13  # uneven over 2 and over 4
TARGET = torch.tensor([3, -100, 0, 12, -100, 7, 5, 11])


def mesh_1d():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def mesh_2d():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def logits(dtype=torch.float64, scale=3.0):
    made = torch.randn(len(TARGET), VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return (made * scale).to(dtype)


def place(value, mesh, *placements):
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def test_names_are_reached_by_the_path_of_the_rfc():
    for name in ("loss_parallel", "is_loss_parallel_active", "gather_tensor_parallel_logits"):
        assert getattr(tensor_parallel, name) is globals()[name]


@loss_parallel(strict=False)
def fail_inside():
    assert is_loss_parallel_active()
    raise KeyError


def test_active_inside_nested_and_after_an_exception():
    assert not is_loss_parallel_active()
    with loss_parallel():
        assert is_loss_parallel_active()
        with pytest.raises(KeyError):
            fail_inside()
        assert is_loss_parallel_active()
        with pytest.raises(ValueError, match="plain"):  # strict again
            F.cross_entropy(logits(), TARGET)
    assert not is_loss_parallel_active()
    F.cross_entropy(logits(), TARGET)  # and a plain loss is a plain loss


def test_the_innermost_context_holds():
    want = F.cross_entropy(logits(), TARGET)
    with loss_parallel(), loss_parallel(strict=False):
        assert torch.equal(F.cross_entropy(logits(), TARGET), want)
    with loss_parallel(strict=False), loss_parallel(), pytest.raises(ValueError, match="plain"):
        F.cross_entropy(logits(), TARGET)


def test_works_as_a_decorator():
    @loss_parallel()
    def inside():
        return is_loss_parallel_active()

    assert inside()
    assert inside()
    assert not is_loss_parallel_active()


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match="DeviceMesh"), loss_parallel("tp"):
        pass


def refused():
    """The message for every kind of scores that are no vocabulary shards."""
    mesh, found = mesh_2d(), {}
    tensors = {
        "plain": (logits(), TARGET),
        "replicated": (place(logits(), mesh, R, R), place(TARGET, mesh, R, R)),
        "batch": (place(logits(), mesh, Shard(0), R), place(TARGET, mesh, Shard(0), R)),
        "other axis": (place(logits(), mesh, Shard(1), R), place(TARGET, mesh, R, R)),
        "other mesh": (place(logits(), mesh_1d(), Shard(1)), place(TARGET, mesh_1d(), R)),
        "plain target": (place(logits(), mesh, Shard(0), Shard(1)), TARGET[:4]),
    }
    for name, (scores, target) in tensors.items():
        for loss in (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss()):
            with loss_parallel(mesh["tp"]):
                try:
                    loss(scores, target)
                except ValueError as error:
                    found.setdefault(name, []).append(str(error))
        assert not is_loss_parallel_active()
    return found


def test_other_scores_are_refused_alike_on_every_rank(ranks):
    by_rank = ranks(4, refused)
    found = by_rank[0]
    assert [list(r) for r in by_rank] == [list(found)] * 4
    assert {name: len(texts) for name, texts in found.items()} == dict.fromkeys(found, 3)
    parts = {
        "plain": "got a plain tensor of shape (8, 13)",
        "replicated": "classes (dim 1) that are sharded over mesh tp=2, got shape (8, 13)",
        "batch": "sharded over mesh tp=2",
        "other axis": "sharded over mesh tp=2",
        "other mesh": "the scores are on mesh tp=4, which has no part tp=2",
        "plain target": "it could be this rank's part or the whole",
    }
    for name, part in parts.items():
        assert all(part in text for text in found[name]), (name, found[name])
    assert "use_local_output=False" in found["plain"][0]


@pytest.mark.ranks(2)
def test_nothing_is_refused_without_strict_or_where_nothing_is_shared():
    want = F.cross_entropy(logits(), TARGET)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for context in (loss_parallel(strict=False), loss_parallel(alone["tp"])):
        with context:
            assert torch.equal(F.cross_entropy(logits(), TARGET), want)
            whole = F.cross_entropy(place(logits(), alone, R, R), TARGET)
    torch.testing.assert_close(whole.full_tensor(), want)


OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore": {"ignore_index": 7},
    "smooth": {"label_smoothing": 0.2},
    "weight": {"weight": torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)},
    "everything": {
        "weight": torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64),
        "label_smoothing": 0.1,
        "reduction": "sum",
        "ignore_index": 5,
    },
}


def gradient_of(loss, leaf):
    """The gradient for distinct gradients of the losses, where there are several."""
    seed = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype) if loss.ndim else None
    (grad,) = torch.autograd.grad(loss, leaf, seed)
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.ranks(4)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", ["cross_entropy", "log_softmax"])
def test_a_plain_target_and_weight_are_every_ranks(option, form):
    """As in torch's loss_parallel. The tensors equal those of plain PyTorch."""

    def loss_of(scores):
        target = TARGET.clamp(min=0) if "ignore_index" in OPTIONS[option] else TARGET
        if form == "cross_entropy":
            return F.cross_entropy(scores, target, **OPTIONS[option])
        return F.nll_loss(F.log_softmax(scores, 1), target, **options)

    options = {k: v for k, v in OPTIONS[option].items() if k != "label_smoothing"}
    plain = logits().requires_grad_()
    want = loss_of(plain)
    for mesh, placements in ((mesh_1d(), [Shard(1)]), (mesh_2d(), [R, Shard(1)]), (mesh_2d(), [Shard(1), Shard(1)])):
        spread = place(logits(), mesh, *placements).requires_grad_()
        with loss_parallel():
            loss = loss_of(spread)
        torch.testing.assert_close(loss.full_tensor(), want)
        torch.testing.assert_close(gradient_of(loss, spread), gradient_of(loss_of(plain), plain))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("option", ["mean", "sum", "none", "ignore", "weight"])  # all that torch's takes
def test_the_numbers_are_those_of_torchs_loss_parallel(option):
    from torch.distributed import tensor as torchs
    from torch.distributed.tensor.parallel import loss_parallel as torchs_loss_parallel

    # Of these two torch's takes no -100 (with weights its backward indexes out of bounds).
    target = TARGET.clamp(min=0) if option in ("ignore", "weight") else TARGET
    mesh = mesh_1d()
    theirs = torchs.distribute_tensor(logits(), mesh, [Shard(1)]).requires_grad_()
    options = dict(OPTIONS[option])
    with torchs_loss_parallel():
        if "weight" in options:
            options["weight"] = torchs.distribute_tensor(options["weight"], mesh, [R])
        loss = F.cross_entropy(theirs, torchs.distribute_tensor(target, mesh, [R]), **options)
        loss.backward(torch.ones_like(loss))
    ours = place(logits(), mesh, Shard(1)).requires_grad_()
    with loss_parallel():
        our_loss = F.cross_entropy(ours, target, **OPTIONS[option])
        our_loss.backward(None if our_loss.ndim == 0 else torch.ones(our_loss.shape, dtype=our_loss.dtype))
    torch.testing.assert_close(our_loss.full_tensor(), loss.full_tensor().detach())
    torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_low_precision_scores_are_float32(dtype):
    wide = logits(dtype).float().requires_grad_()
    want = F.cross_entropy(wide, TARGET)
    want.backward()
    spread = place(logits(dtype), mesh_1d(), Shard(1)).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(spread, TARGET)
        composed = F.nll_loss(F.log_softmax(spread, 1), TARGET)
        summed = F.cross_entropy(spread, TARGET, reduction="none")
    assert (loss.dtype, composed.dtype, summed.dtype) == (torch.float32,) * 3
    torch.testing.assert_close(loss.full_tensor(), want.detach())
    torch.testing.assert_close(composed.full_tensor(), want.detach(), rtol=1e-2, atol=0)
    loss.backward()
    assert spread.grad.dtype == dtype
    torch.testing.assert_close(spread.grad.full_tensor(), wide.grad.to(dtype))
    assert F.cross_entropy(spread, place(TARGET, mesh_1d(), R)).dtype == dtype, "outside, the dtype is PyTorch's"


EXTREME = {
    "cross_entropy": lambda scores, target: F.cross_entropy(scores, target, reduction="none"),
    "smooth": lambda scores, target: F.cross_entropy(scores, target, reduction="none", label_smoothing=0.1),
    "log_softmax": lambda scores, target: F.nll_loss(F.log_softmax(scores, 1), target, reduction="none"),
    "softmax": lambda scores, target: scores.softmax(1),
    "head": lambda scores, target: FusedLinearCrossEntropyLoss(reduction="none", strict=False)(
        distribute_tensor(torch.eye(len(target)).double(), mesh_1d(), [R])
        if isinstance(scores, DTensor)
        else torch.eye(len(target)).double(),
        scores.mT,
        target,
    ),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", EXTREME)
def test_large_scores_are_exact_and_infinite_ones_are_what_they_are_on_one_device(form):
    value = logits()
    value[0] += 1e12  # next to the maximum the log of the sum vanishes
    if form != "head":  # infinity times zero
        value[1, :5], value[2, 3], value[3] = -torch.inf, torch.inf, -torch.inf
    plain, spread = value.clone().requires_grad_(), place(value, mesh_1d(), Shard(1)).requires_grad_()
    want, loss = (EXTREME[form](s, t) for s, t in ((plain, TARGET), (spread, place(TARGET, mesh_1d(), R))))
    torch.testing.assert_close(loss.full_tensor(), want, equal_nan=True)
    loss.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad, equal_nan=True)


@pytest.mark.ranks(4)
def test_two_all_reduces_forward_and_none_backward():
    spread = place(logits(), mesh_1d(), Shard(1)).requires_grad_()
    with loss_parallel(), CommTrace() as trace:
        F.cross_entropy(spread, TARGET, label_smoothing=0.1).backward()
    assert (trace.phase("forward"), trace.phase("backward")) == ({"all_reduce": 2}, {})


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dp", [R, Shard(0), Shard(1), Shard(2)])
def test_gathered_logits_give_the_parallel_loss(dp):
    placements = (dp, Shard(2))
    value = torch.randn(2, 4, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spread = place(value, mesh_2d(), *placements).requires_grad_()
    gathered = gather_tensor_parallel_logits(spread)
    assert not gathered.layout.shard_order[2]
    assert gathered.layout.shard_order[:2] == spread.layout.shard_order[:2]
    plain = value.clone().requires_grad_()
    target = TARGET.view(2, 4)
    F.cross_entropy(plain.transpose(1, 2), target).backward()
    kept = [p if p.is_shard() and p.dim < 2 else R for p in placements]
    F.cross_entropy(gathered.transpose(1, 2), place(target, mesh_2d(), *kept)).backward()
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad)
    with loss_parallel(), pytest.raises(ValueError, match="sharded"):
        F.cross_entropy(gathered.transpose(1, 2), target)


def gather_plain(size, given):
    part = distribute_tensor(logits()[:, :size], mesh_1d(), [Shard(1)]).to_local()
    with contextlib.suppress(TypeError):
        return gather_tensor_parallel_logits(part, mesh_1d(), vocab_size=given)


@pytest.mark.parametrize("size", [13, 12, 5, 2])  # uneven, even, an empty last rank, two empty ones
def test_plain_parts_are_gathered(ranks, size):
    for whole in ranks(4, gather_plain, size, None):
        assert torch.equal(whole, logits()[:, :size])


def wrong_parts():
    import torch.distributed as dist

    part = torch.zeros(2, dist.get_rank() + 1)
    with pytest.raises(ValueError, match=r"the ranks hold \[1, 2, 3, 4\] classes") as caught:
        gather_tensor_parallel_logits(part, mesh_1d())
    with pytest.raises(ValueError, match="needs the 1-D mesh"):
        gather_tensor_parallel_logits(part)
    return str(caught.value)


def test_parts_that_are_not_those_of_chunk_are_refused_on_every_rank(ranks):
    assert len(set(ranks(4, wrong_parts))) == 1


@pytest.mark.ranks(4)
def test_plain_gradients_are_slices():
    part = place(logits(), mesh_1d(), Shard(1)).to_local().requires_grad_()
    F.cross_entropy(gather_tensor_parallel_logits(part, mesh_1d()), TARGET).backward()
    plain = logits().requires_grad_()
    F.cross_entropy(plain, TARGET).backward()
    want = DTensor.from_local(part.grad, mesh_1d(), [Shard(1)], shape=plain.shape).full_tensor()
    torch.testing.assert_close(want, plain.grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_log_softmax_then_nll_loss_costs_two_all_reduces_and_none_backward(dtype):
    """The loss is a pending sum, which is reduced when it is read."""
    spread = place(logits(dtype), mesh_1d(), Shard(1)).requires_grad_()
    with redistribute_policy("strict"), loss_parallel(), CommTrace() as trace:
        loss = nn.NLLLoss()(nn.LogSoftmax(1)(spread), TARGET)
        (loss / 2).backward()
    assert (trace.phase("forward"), trace.phase("backward")) == ({"all_reduce": 2}, {})
    assert loss.placements == (Partial(),)
    plain = logits(dtype).requires_grad_()
    want = nn.NLLLoss()(nn.LogSoftmax(1)(plain).to(loss.dtype), TARGET)
    (want / 2).backward()
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad)
    with CommTrace() as trace:
        assert loss.item() == pytest.approx(want.item(), rel=1e-2 if dtype is torch.bfloat16 else 1e-12)
        assert float(loss) == loss.item()
    assert trace.counts == {"all_reduce": 1}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dp", [R, Shard(0)])
@pytest.mark.parametrize("tokens", [None, 5])
def test_the_loss_function_of_transformers(dp, tokens):
    """Which casts, shifts, flattens and divides by a number of tokens."""
    loss_of = pytest.importorskip("transformers.loss.loss_utils").ForCausalLMLoss
    value, labels = logits().view(2, 4, VOCABULARY), TARGET.view(2, 4)
    plain = value.clone().requires_grad_()
    want = loss_of(plain, labels, VOCABULARY, num_items_in_batch=tokens)
    want.backward()
    spread = place(value, mesh_2d(), dp, Shard(2)).requires_grad_()
    with loss_parallel(mesh_2d()["tp"]):
        loss = loss_of(spread, place(labels, mesh_2d(), dp, R), VOCABULARY, num_items_in_batch=tokens)
    loss.backward()
    torch.testing.assert_close(loss.full_tensor(), want)
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad)
