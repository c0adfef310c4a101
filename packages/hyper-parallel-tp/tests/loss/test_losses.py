"""The loss modules against plain PyTorch: every option on many layouts, what they cost, and normalisation by tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    CommTrace,
    FusedLinearCrossEntropyLoss,
    ParallelCrossEntropyLoss,
    Replicate,
    Shard,
    count_tokens,
    distribute_tensor,
    init_device_mesh,
)

R = Replicate()
BATCH, SEQUENCE, FEATURES, VOCABULARY = 3, 5, 6, 13  # nothing divides
CHUNKS = nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None)
WEIGHT = torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)
LABELS = torch.tensor([[3, -100, 0, 12, -100], [7, 5, 11, -100, 2], [-100, -100, -100, -100, 4]])
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore": {"ignore_index": 7},
    "smooth": {"label_smoothing": 0.2},
    "weight": {"weight": WEIGHT},
    "everything": {"weight": WEIGHT, "label_smoothing": 0.1, "reduction": "none", "ignore_index": 5},
}
# (mesh, placements of (batch, sequence, features or vocabulary), those of the weight's rows)
LAYOUTS = {
    "tp": ((4,), (Shard(2),)),
    "dp, tp": ((2, 2), (Shard(0), Shard(2))),
    "cp, tp": ((2, 2), (Shard(1), Shard(2))),
    "tp, dp": ((2, 2), (Shard(2), Shard(0))),
    "tp, tp": ((2, 2), (Shard(2), Shard(2))),
    "idle, tp": ((2, 2), (R, Shard(2))),
}


def labels_of(option):
    return LABELS.clamp(min=0) if "ignore_index" in OPTIONS[option] else LABELS


def leaf(*shape, seed):
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def spread(value, shape, placements):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
    made = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
    return made.requires_grad_() if value.requires_grad else made


def rows(placements):
    """What those of the scores mean for the labels: without the vocabulary."""
    return [p if p.is_shard() and p.dim < 2 else R for p in placements]


def backward(loss):
    loss.backward(None if loss.ndim == 0 else torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape))


def check_scores(shape, placements, option):
    plain, labels = leaf(BATCH, SEQUENCE, VOCABULARY, seed=1), labels_of(option)
    want = F.cross_entropy(plain.movedim(-1, 1), labels, **OPTIONS[option])
    backward(want)
    scores, target = spread(plain, shape, placements), spread(labels, shape, rows(placements))
    loss = ParallelCrossEntropyLoss(**OPTIONS[option], class_dim=-1)(scores, target)
    torch.testing.assert_close(loss.full_tensor(), want)
    backward(loss)
    assert scores.grad.layout is scores.layout
    torch.testing.assert_close(scores.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_of_a_language_model(layout, option):
    check_scores(*LAYOUTS[layout], option)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("option", ["mean", "everything"])
def test_scores_on_a_mesh_of_three_axes(option):
    check_scores((2, 2, 2), (Shard(0), Shard(1), Shard(2)), option)


@pytest.mark.ranks(4)
def test_probabilities_of_a_language_model():
    plain = leaf(BATCH, SEQUENCE, VOCABULARY, seed=1)
    target = leaf(BATCH, SEQUENCE, VOCABULARY, seed=2).detach().softmax(-1).requires_grad_()
    F.cross_entropy(plain.movedim(-1, 1), target.movedim(-1, 1), WEIGHT, label_smoothing=0.1).backward()
    for shape, placements in LAYOUTS.values():
        scores, probabilities = spread(plain, shape, placements), spread(target, shape, placements)
        ParallelCrossEntropyLoss(WEIGHT, label_smoothing=0.1, class_dim=-1)(scores, probabilities).backward()
        torch.testing.assert_close(scores.grad.full_tensor(), plain.grad)
        torch.testing.assert_close(probabilities.grad.full_tensor(), target.grad)


@pytest.mark.ranks(4)
def test_scores_with_pytorchs_class_dim():
    plain = leaf(4, VOCABULARY, seed=1)
    want = F.cross_entropy(plain, LABELS.flatten()[:4])
    loss = ParallelCrossEntropyLoss()(spread(plain, (4,), [Shard(1)]), LABELS.flatten()[:4])
    torch.testing.assert_close(loss.full_tensor(), want)
    with pytest.raises(ValueError, match="class_dim is 1"):
        ParallelCrossEntropyLoss(class_dim=2)


# Hidden states per layout of the scores; the axis of the vocabulary may hold sequence shards.
HEADS = {
    "tp": ((4,), (R,), (Shard(0),)),
    "tp, sequence parallel": ((4,), (Shard(1),), (Shard(0),)),
    "dp, tp": ((2, 2), (Shard(0), R), (R, Shard(0))),
    "dp, tp, sequence parallel": ((2, 2), (Shard(0), Shard(1)), (R, Shard(0))),
    "cp, tp, sequence parallel": ((2, 2), (Shard(1), Shard(1)), (R, Shard(0))),
    "tp, tp": ((2, 2), (R, R), (Shard(0), Shard(0))),
    "dp": ((4,), (Shard(0),), (R,)),
}


def check_head(shape, of_hidden, of_weight, option):
    hidden, weight = leaf(BATCH, SEQUENCE, FEATURES, seed=1), leaf(VOCABULARY, FEATURES, seed=2)
    bias, labels = leaf(VOCABULARY, seed=3), labels_of(option)
    want = F.cross_entropy(F.linear(hidden, weight, bias).movedim(-1, 1), labels, **OPTIONS[option])
    backward(want)
    parts = [spread(hidden, shape, of_hidden), spread(weight, shape, of_weight), spread(bias, shape, of_weight)]
    strict = any(p.is_shard() for p in of_weight)
    criterion = FusedLinearCrossEntropyLoss(**OPTIONS[option], options=CHUNKS, strict=strict)
    loss = criterion(parts[0], parts[1], spread(labels, shape, of_hidden), parts[2])
    torch.testing.assert_close(loss.full_tensor(), want)
    backward(loss)
    for got, single in zip(parts, (hidden, weight, bias), strict=True):
        assert got.grad.layout is got.layout
        torch.testing.assert_close(got.grad.full_tensor(), single.grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", HEADS)
def test_a_head_in_chunks(layout, option):
    check_head(*HEADS[layout], option)


@pytest.mark.ranks(8)
def test_a_head_on_a_mesh_of_three_axes():
    check_head((2, 2, 2), (Shard(0), Shard(1), Shard(1)), (R, R, Shard(0)), "everything")


@pytest.mark.ranks(4)
def test_plain_hidden_states_and_weight_without_strict():
    hidden, weight = leaf(BATCH, SEQUENCE, FEATURES, seed=1), leaf(VOCABULARY, FEATURES, seed=2)
    loss = FusedLinearCrossEntropyLoss(strict=False)(hidden, weight, LABELS)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), LABELS.flatten()))
    with pytest.raises(ValueError, match="sharded, got a plain tensor"):
        FusedLinearCrossEntropyLoss()(hidden, weight, LABELS)


def head_costs(of_hidden, chunk):
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
    hidden, weight = leaf(4, 8, FEATURES, seed=1), leaf(VOCABULARY, FEATURES, seed=2)
    parts = spread(hidden, (4,), of_hidden), spread(weight, (4,), [Shard(0)])
    labels = torch.zeros(4, 8, dtype=torch.int64)
    with CommTrace() as trace:
        FusedLinearCrossEntropyLoss(options=options)(*parts, spread(labels, (4,), [R])).backward()
    return dict(trace.phase("forward")), dict(trace.phase("backward"))


@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_a_head_costs_the_same_in_any_number_of_chunks(ranks, chunk):
    whole, parts = ({"all_reduce": 2}, {"all_reduce": 1}), ({"all_gather": 1, "all_reduce": 2}, {"reduce_scatter": 1})
    assert ranks(4, head_costs, [R], chunk) == [whole] * 4
    assert ranks(4, head_costs, [Shard(1)], chunk) == [parts] * 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_low_precision_head_accumulates_in_float32(smoothing):
    hidden, weight = (leaf(*s, seed=i).detach().bfloat16() for i, s in enumerate([(8, 64), (96, 64)]))
    labels = torch.arange(8) * 11
    # What one device computes from the same bfloat16 scores, with all that follows in float32.
    plain = [t.clone().requires_grad_() for t in (hidden, weight)]
    want = F.cross_entropy(F.linear(*plain).float(), labels, label_smoothing=smoothing)
    want.backward()
    parts = [spread(t.requires_grad_(), (4,), [p]) for t, p in ((hidden, R), (weight, Shard(0)))]
    criterion = FusedLinearCrossEntropyLoss(options=CHUNKS, label_smoothing=smoothing)
    loss = criterion(*parts, labels)
    loss.backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.full_tensor(), want, rtol=1e-5, atol=0)
    for got, single in zip(parts, plain, strict=True):
        assert got.grad.dtype is torch.bfloat16
        largest = single.grad.float().abs().max()
        torch.testing.assert_close(got.grad.full_tensor().float(), single.grad.float(), rtol=0.02, atol=0.01 * largest)


@pytest.mark.ranks(4)
def test_micro_batches_sum_to_the_mean_over_all_tokens():
    """Of ten micro-batches' worth of tokens most are ignored in one and none in the other."""
    hidden, weight = leaf(4, SEQUENCE, FEATURES, seed=1), leaf(VOCABULARY, FEATURES, seed=2)
    labels = torch.cat([LABELS, LABELS[1:2]])
    F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten()).backward()
    shape, of_batch = (2, 2), [Shard(0), R]
    head = spread(weight, shape, [R, Shard(0)])
    batches = [spread(labels[i::2], shape, of_batch) for i in range(2)]
    with CommTrace() as trace:
        tokens = count_tokens(batches)
    assert trace.counts == {"all_reduce": 1}
    assert int(tokens) == int((labels != -100).sum())
    for criterion in (
        lambda h, y: FusedLinearCrossEntropyLoss(options=CHUNKS)(h, head, y, num_tokens=tokens),
        lambda h, y: ParallelCrossEntropyLoss(class_dim=-1)(F.linear(h, head), y, tokens),
    ):
        head.grad, total = None, 0.0
        for i, target in enumerate(batches):
            loss = criterion(spread(hidden[i::2], shape, of_batch), target)
            loss.backward()
            total += loss.item()
        torch.testing.assert_close(head.grad.full_tensor(), weight.grad)
        assert total == pytest.approx(F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten()).item())


@pytest.mark.ranks(4)
def test_tokens_of_plain_targets_are_counted_over_the_mesh_that_is_given():
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    mine = LABELS[: dist.get_rank() % 3 + 1]
    counts = [int((LABELS[: r % 3 + 1] != -100).sum()) for r in range(4)]
    assert int(count_tokens(mine)) == counts[dist.get_rank()]
    assert int(count_tokens([mine, mine], mesh=mesh)) == 2 * sum(counts)
    assert int(count_tokens(LABELS, ignore_index=7)) == LABELS.numel() - 1


def test_only_a_mean_is_normalised():
    with pytest.raises(ValueError, match="num_tokens normalises a mean"):
        ParallelCrossEntropyLoss(reduction="sum")(leaf(2, 3, seed=1), torch.zeros(2).long(), num_tokens=3)
    with pytest.raises(ValueError, match="no targets"):
        count_tokens([])
