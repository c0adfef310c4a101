"""Reading and writing parts of a tensor against plain torch, on all layouts; and no write is ever lost."""

import pytest
import torch

from hyper_parallel import PackedShard, Replicate, Shard, distribute_tensor, redistribute_policy
from hyper_parallel.comm.trace import CommTrace
from hyper_parallel.testing import OpConformance, make, sample, tensor
from hyper_parallel.testing.checking import mesh_of

MATRIX = tensor(5, 6)
IDS = torch.tensor([0, 2, 1, 2])
COLUMNS = torch.tensor([False, True, False, True, True, False])
ROWS = torch.tensor([True, False, True, True, False])


DISTINCT = torch.tensor([4, 1, 0])
MASK = torch.tensor([[1, 0, 1, 1, 0, 0], [0] * 6, [1] * 6, [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()


ONE_ROW = torch.tensor([False, False, False, True, False])


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 20


class TestGetItem(Quick):
    op = torch.Tensor.__getitem__
    samples = (
        sample(MATRIX, 1).options(name="int"),
        sample(tensor(8, 3), slice(2, 6)).options(name="kept"),
        sample(tensor(8, 3), (slice(None, None, 2), None)).options(name="step"),
        sample(tensor(2, 1, 6), (None, slice(1, 7), Ellipsis, -1)).options(name="mixed"),
        sample(MATRIX, slice(0, 0)).options(name="empty"),
        sample(MATRIX, [0, 2]).options(name="list"),
        sample(MATRIX, IDS).options(name="ids"),
        sample(tensor(2, 1, 6), (0, slice(None), IDS.view(2, 2))).options(name="int and ids"),
        sample(MATRIX, (IDS[:, None], IDS)).options(name="broadcast ids"),
        sample(MATRIX, ROWS).options(name="mask"),
        sample(MATRIX, (slice(None), COLUMNS)).options(name="mask of columns"),
        sample(MATRIX, tensor(5, 6, dtype=torch.bool)).options(name="mask of all"),
        sample(tensor(5, 6, 2), tensor(5, 6, dtype=torch.bool)).options(name="mask of two dims"),
        sample(MATRIX, slice(1, None)).options(name="part"),
        sample(tensor(9), slice(1, None, 3)).options(name="part with steps"),
        sample(MATRIX, (slice(None, -1), slice(2, 5))).options(name="block"),
        sample(MATRIX, -2).options(name="negative int"),
        sample(MATRIX, IDS - 3).options(name="negative ids"),
        sample(tensor(5, 6, dtype=torch.bool), (2, IDS)).options(name="bool"),
        sample(MATRIX, tensor(dtype=torch.int64)).options(name="int in a tensor"),
        sample(MATRIX, True).options(name="True"),
        sample(tensor(5, 3, 2), ROWS).options(name="mask of rows of matrices"),
        sample(tensor(3, 5, 2), (slice(1, None), ROWS)).options(name="mask behind a slice"),
        sample(MATRIX, (False, slice(1, None))).options(name="False"),
        sample(MATRIX, []).options(name="empty list"),
        sample(MATRIX, [[0, 4], [5, 1]]).options(name="list that counts as a tuple"),
        sample(MATRIX, (ROWS, DISTINCT)).options(name="mask and ids"),
        sample(tensor(2, 5, 6), (slice(None), DISTINCT[:, None], COLUMNS)).options(name="2-D ids and mask"),
        sample(tensor(5, 6, 2), (MASK, tensor(12, dtype=torch.int64, high=2))).options(name="mask of two dims and ids"),
        sample(MATRIX, (ONE_ROW, None, DISTINCT)).options(name="one picked row and ids"),
        sample(tensor(6, 5, 6), (COLUMNS, ROWS, [0, 5, 2])).options(name="two masks and a list"),
    )


@pytest.mark.ranks(4)
def test_an_array_of_several_dims_is_one_index():
    """And no tuple of its rows, as a list of lists is."""
    numpy = pytest.importorskip("numpy")
    value, places = torch.arange(12.0).reshape(4, 3), numpy.array([[0, 3], [2, 1]])
    for placement in (Shard(0), Shard(1)):
        x = distribute_tensor(value.clone(), mesh_of((4,)), [placement])
        torch.testing.assert_close(x[places].full_tensor(), value[places])
        x[places[:1]] = 7.0
        want = value.clone()
        want[places[:1]] = 7.0
        torch.testing.assert_close(x.full_tensor(), want)


class TestNarrow(Quick):
    op = torch.narrow
    samples = (sample(tensor(8, 3), 0, 2, 4), sample(MATRIX, -1, 1, 2), sample(MATRIX, 0, torch.tensor(1), 3))


class TestSelect(Quick):
    op = torch.select
    samples = (sample(MATRIX, 1, -1), sample(tensor(2, 1, 6), 0, 1))


class TestSplit(Quick):
    op = torch.split
    samples = (sample(MATRIX, 2), sample(MATRIX, [1, 2, 3], -1), sample(tensor(8, 3), [4, 4]))


class TestChunk(Quick):
    op = torch.chunk
    samples = (sample(MATRIX, 2, 1), sample(tensor(8, 3), 4))


class TestTensorSplit(Quick):
    op = torch.tensor_split
    samples = (
        sample(MATRIX, 3, 1),
        sample(MATRIX, (1, 4)),
        sample(MATRIX, torch.tensor([1, 4])),
        sample(MATRIX, sections=2),
        sample(MATRIX, indices=(1, 3), dim=1),
    )


class TestUnbind(Quick):
    op = torch.unbind
    samples = (sample(MATRIX, 1), sample(tensor(2, 3)))


def written(x, index, value):
    x = x.clone()
    x[index] = value
    return x


class TestSetItem(Quick):
    op = written
    max_layouts = 15
    samples = (
        sample(MATRIX, slice(2, 5), 1.5).options(name="number"),
        sample(MATRIX, 1, tensor(6)).options(name="row"),
        sample(MATRIX, (slice(2, None), 1), tensor(3)).options(name="part of a column"),
        sample(MATRIX, (slice(None), slice(1, 5, 2)), tensor(5, 2)).options(name="steps"),
        sample(tensor(8, 3), slice(2, 6), tensor(4, 3)).options(name="kept"),
        sample(MATRIX, slice(2, None), tensor(1, 6)).options(name="broadcast"),
        sample(MATRIX, tensor(5, 6, dtype=torch.bool), -1.0).options(name="mask"),
        sample(MATRIX, DISTINCT, tensor(3, 6)).options(name="ids"),
        sample(MATRIX, (slice(None), DISTINCT), tensor(5, 1)).options(name="ids of columns"),
        sample(MATRIX, (DISTINCT, IDS[1:]), tensor(3)).options(name="two ids"),
        sample(MATRIX, (DISTINCT[:2, None], DISTINCT), 2.0).options(name="broadcast ids"),
        sample(MATRIX, (2, [0, 3]), tensor(2)).options(name="int and list"),
        sample(MATRIX, ROWS, tensor(3, 6)).options(name="mask with rows"),
        sample(MATRIX, MASK, tensor(12)).options(name="mask with values"),
        sample(tensor(2, 6, 3), (slice(1, None), DISTINCT), tensor(1, 3, 3)).options(name="slice and ids"),
        sample(MATRIX, (ROWS, DISTINCT), tensor(3)).options(name="mask and ids"),
        sample(tensor(2, 5, 6), (slice(None), DISTINCT[:, None], COLUMNS), tensor(3, 3)).options(
            name="2-D ids and mask"
        ),
        sample(tensor(5, 6, 2), (MASK, tensor(12, dtype=torch.int64, high=2)), 2.5).options(name="mask of 2 dims, ids"),
        sample(MATRIX, (ONE_ROW, DISTINCT), tensor(3)).options(name="one picked row and ids"),
        sample(MATRIX, (ROWS, [True, False, False, True, True, False]), tensor(1)).options(name="two masks"),
    )


class TestIndexPut(Quick):
    op = torch.index_put
    inplace = "index_put_"
    max_layouts = 15
    samples = (
        sample(MATRIX, (DISTINCT,), tensor(3, 6)),
        sample(MATRIX, (IDS,), tensor(4, 6), accumulate=True),
        sample(MATRIX, [IDS, IDS], tensor(4), True),
        sample(MATRIX, (ROWS, DISTINCT), tensor(3), True).options(name="mask and ids"),
        sample(tensor(5, 6, 2), (MASK,), tensor(12, 2), True).options(name="mask of two dims"),
        sample(tensor(5, 6, 2), (IDS.view(2, 2), IDS[:2]), tensor(2, 2, 2), True).options(name="2-D ids"),
    )


def put_into_repeated_rows(row, ids, values):
    return row.expand(5, 6).index_put((ids,), values)


class TestPutIntoRepeatedRows(Quick):
    """The result is a copy, in which rows do not share their memory."""

    op = put_into_repeated_rows
    samples = (sample(tensor(6), DISTINCT, tensor(3, 6)),)


def written_in_parts(x, row):
    """Python reads a part, changes it in place, and assigns it."""
    x = x.clone()
    x[0] += 1
    x[2:] -= row
    x[1:4, ::2] *= 2
    x[-1] = x[1]
    x.t()[2] += x.sum()
    x.unsqueeze(0)[0, 3] *= row
    x.view(2, 3, -1)[1, 1:] /= 2
    return x


class TestPartsWrittenTo(Quick):
    """As ``x[2:] += 1`` is three calls, of which the last is done already where the part is a copy."""

    op = written_in_parts
    samples = (sample(tensor(6, 6), tensor(6)), sample(tensor(6, 5), tensor(5)))


class TestMaskedScatter(Quick):
    op = torch.masked_scatter
    inplace = "masked_scatter_"
    max_layouts = 8
    samples = (
        sample(MATRIX, MASK, tensor(4, 4)),
        sample(tensor(3, 5, 2), ROWS[:, None], tensor(18)),
        sample(tensor(3, 5, 2), ROWS[:, None], tensor(5, 2, 2)).options(name="rows of matrices"),
        sample(MATRIX, ROWS[:, None], tensor(3, 6)).options(name="rows"),
        sample(MATRIX, torch.zeros(5, 1).bool(), tensor(0, 6)).options(name="none"),
        sample(MATRIX, torch.tensor(True), tensor(5, 6)).options(name="all"),
    )


class TestMaskedScatterWithBroadcast(Quick):
    op = torch.masked_scatter
    max_layouts = 8
    samples = (sample(tensor(1, 6), MASK, tensor(20)), sample(tensor(6), MASK, tensor(20)))


def with_image_features(embeddings, places, features):
    """As the multimodal models of Hugging Face put them in."""
    return embeddings.masked_scatter(places.unsqueeze(-1).expand_as(embeddings), features)


class TestImageFeatures(Quick):
    op = with_image_features
    max_layouts = 8
    samples = (sample(tensor(3, 5, 4), tensor(3, 5, dtype=torch.bool), tensor(13, 4)),)


class TestMaskedSelect(Quick):
    op = torch.masked_select
    out = True
    samples = (sample(MATRIX, MASK), sample(MATRIX, COLUMNS))


class TestNonzero(Quick):
    op = torch.nonzero
    samples = (
        sample(tensor(5, 6, dtype=torch.int64, high=2)),
        sample(tensor(7, dtype=torch.bool), as_tuple=True),
        sample(tensor(2, 1, 3, dtype=torch.bool)),
    )


class TestWhere(Quick):
    op = torch.where
    samples = (
        sample(tensor(5, 6, dtype=torch.int64, high=2)),
        sample(MASK, MATRIX, tensor(6)),
        sample(MASK, MATRIX, 0.0),
    )


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((4,)), placements)


@pytest.mark.ranks(4)
def test_a_packed_weight_splits_without_communication():
    value = torch.randn(16, 3)
    with CommTrace() as trace:
        q, k, v = spread(value, Shard(0)).redistribute(placements=[PackedShard(0, (8, 4, 4))]).split([8, 4, 4])
    assert trace.counts.get("all_gather", 0) == 0
    assert [p.placements for p in (q, k, v)] == [(Shard(0),)] * 3
    assert torch.equal(torch.cat([p.full_tensor() for p in (q, k, v)]), value)


@pytest.mark.ranks(4)
def test_views_of_a_sharded_tensor_are_views():
    x = spread(torch.zeros(8, 3), Shard(0))
    x[::2].add_(1)
    x.narrow(1, 0, 1).fill_(5)
    first, _ = x.split([1, 2], 1)
    first[:4, 0] = 7
    want = torch.zeros(8, 3)
    want[::2] += 1
    want[:, :1] = 5
    want[:4, 0] = 7
    assert torch.equal(x.full_tensor(), want)


@pytest.mark.ranks(4)
def test_a_write_to_the_tensor_raises_while_a_copy_of_a_part_lives():
    x = spread(torch.zeros(8, 3), Shard(0))
    copies = (lambda: x[:3], lambda: x[5], lambda: x.split([3, 5])[0], lambda: x.unbind()[1], lambda: x[:3][0])
    for copy in copies:
        part = copy()
        with pytest.raises(RuntimeError, match="would change with it"):
            x.mul_(2)
        del part
    x.mul_(2)


@pytest.mark.ranks(4)
def test_ids_beside_a_mask_of_another_order_of_axes_lie_as_what_it_picks():
    values = torch.randn(5, 6, 2), MASK, torch.arange(12) % 2
    layouts = [Replicate()] * 2, [Shard(0), PackedShard(0, (4, 1))], [Shard(0)] * 2
    x, mask, ids = (make(v, mesh_of((2, 2)), layout) for v, layout in zip(values, layouts, strict=True))
    with redistribute_policy("auto"):
        out = x[mask, ids]
    assert torch.equal(out.full_tensor(), values[0][values[1:]])


@pytest.mark.ranks(4)
def test_ids_sharded_over_more_axes_than_the_mask_that_is_written_by_are_gathered():
    """The mask follows the target, which stays."""
    values = torch.randn(5, 6), ROWS, DISTINCT
    layouts = [Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0)] * 2
    x, mask, ids = (make(v, mesh_of((2, 2)), layout) for v, layout in zip(values, layouts, strict=True))
    with redistribute_policy("auto"):
        x[mask, ids] = 7.0
    want = values[0].clone()
    want[values[1:]] = 7.0
    assert torch.equal(x.full_tensor(), want)


@pytest.mark.ranks(4)
def test_sharded_values_travel_to_the_slice_that_they_are_written_to():
    """Windows that are shifted by one position, as the compressors of deepseek_v4 write them."""
    value = torch.randn(6, 2, 3)
    x, mine = spread(torch.zeros(7, 2, 5), Shard(0)), spread(value, Shard(0)).requires_grad_()
    factors = spread(torch.arange(7.0).view(7, 1, 1), Shard(0))
    with CommTrace() as trace:
        x[1:, :, :3] = mine
    assert trace.counts == {"all_to_all": 1}
    assert torch.equal(x.full_tensor()[1:, :, :3], mine.full_tensor())
    (x * factors).sum().backward()
    assert torch.equal(mine.grad.full_tensor(), torch.arange(1.0, 7).view(6, 1, 1).expand(6, 2, 3))


# layouts of embeddings [4, 5, 6], places and features [12, 6] on a 2 x 2 mesh; collectives forward and backward
BATCH, SEQUENCE, FEATURES = [Shard(0), Replicate()], [Replicate(), Shard(1)], [Replicate(), Shard(2)]
WHOLE, TRAVEL = [Replicate()] * 2, {"all_to_all": 1}
IMAGES = {
    "batch": (BATCH, BATCH, BATCH, {"all_gather": 1} | TRAVEL, TRAVEL),
    "batch, whole features": (BATCH, BATCH, WHOLE, {"all_gather": 1}, {"all_reduce": 1}),
    "sequence": (SEQUENCE, SEQUENCE, [Replicate(), Shard(0)], {"all_gather": 2} | TRAVEL, TRAVEL),
    "features": (FEATURES, WHOLE, [Replicate(), Shard(1)], {}, {}),
    "batch and features": ([Shard(0), Shard(2)], BATCH, [Shard(0), Shard(1)], {"all_gather": 1} | TRAVEL, TRAVEL),
    "images over all": (BATCH, BATCH, [Shard(0), Shard(0)], {"all_gather": 2} | TRAVEL, TRAVEL),
    "whole embeddings": (WHOLE, BATCH, BATCH, {"all_gather": 1} | TRAVEL, {"all_gather": 1} | TRAVEL),
    "other dims": (BATCH, BATCH, [Shard(1), Replicate()], {"all_gather": 1, "all_to_all": 2}, {"all_to_all": 2}),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", IMAGES)
def test_features_travel_to_their_places(name):
    *layouts, forward_counts, backward_counts = IMAGES[name]
    torch.manual_seed(0)
    embeddings, places, features = torch.randn(4, 5, 6), torch.zeros(20, dtype=torch.bool), torch.randn(12, 6)
    places[[0, 3, 4, 5, 6, 7, 8, 9, 12, 17, 19]] = True
    values = embeddings, places.view(4, 5), features
    plain = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
    wanted = with_image_features(*plain)
    wanted.square().sum().backward()
    given = [distribute_tensor(v, mesh_of((2, 2)), p) for v, p in zip(values, layouts, strict=True)]
    given = [g.requires_grad_(g.is_floating_point()) for g in given]
    with CommTrace() as forward:
        out = with_image_features(*given)
    weights = out.detach() * 2
    with CommTrace() as backward:
        out.backward(weights)
    assert (dict(forward.counts), dict(backward.counts)) == (forward_counts, backward_counts)
    assert torch.equal(out.full_tensor(), wanted)
    for have, want in zip(given[::2], plain[::2], strict=True):
        assert torch.equal(have.grad.full_tensor(), want.grad)
    with pytest.raises(RuntimeError, match="at least 66 elements in source, got 60"):
        with_image_features(*given[:2], given[2].detach()[:10])


@pytest.mark.ranks(4)
def test_features_that_are_where_they_belong_stay():
    places = torch.tensor([[True, False, True], [False, True, True]] * 4)
    layouts = [Shard(0)], [Shard(0)], [Shard(0)]
    values = torch.zeros(8, 3, 2), places, torch.arange(32.0).view(16, 2)
    given = [distribute_tensor(v, mesh_of((4,)), p) for v, p in zip(values, layouts, strict=True)]
    with CommTrace() as trace:
        out = with_image_features(*given)
        given[0].masked_scatter_(given[1][..., None], given[2])
    assert dict(trace.counts) == {"all_gather": 2}
    assert torch.equal(out.full_tensor(), with_image_features(*values))
    assert torch.equal(given[0].full_tensor(), with_image_features(*values))


@pytest.mark.ranks(4)
def test_a_tensor_as_bound_of_a_slice_is_read():
    x, bound = spread(torch.arange(8.0), Replicate()), spread(torch.tensor(3), Replicate())
    assert x[:bound].shape == (3,)
    assert x[: bound + 1].shape == (4,)


@pytest.mark.ranks(4)
def test_ids_that_a_mask_picked_go_beside_it():
    """``x[mask, labels[mask]]``: what the mask picks of the labels lies as what it picks of ``x``."""
    torch.manual_seed(0)
    x, labels = torch.randn(7, 5, dtype=torch.float64), torch.tensor([4, 0, 0, 3, 1, 2, 2])
    mask = torch.tensor([True, False, True, True, True, False, True])
    plain = x.clone().requires_grad_()
    weights = torch.arange(1.0, 6, dtype=torch.float64)
    (plain[mask, labels[mask]] * weights).sum().backward()
    mine, chosen = spread(x, Shard(0)).requires_grad_(), spread(mask, Shard(0))
    picked_labels = spread(labels, Shard(0))[chosen]
    with CommTrace() as trace:
        picked = mine[chosen, picked_labels]
    assert trace.counts == {"all_gather": 1, "all_to_all": 2}
    assert picked.placements == (Shard(0),)
    assert torch.equal(picked.full_tensor(), x[mask, labels[mask]])
    weights = spread(weights, Shard(0))
    with CommTrace() as trace:
        (picked * weights).sum().backward()
    assert trace.counts == {"all_to_all": 1}
    assert torch.equal(mine.grad.full_tensor(), plain.grad)
    with CommTrace() as trace:
        mine.detach()[chosen, picked_labels] = picked.detach() * 2
    assert trace.counts == {"all_gather": 1, "all_to_all": 2}
    want = x.clone()
    want[mask, labels[mask]] *= 2
    assert torch.equal(mine.full_tensor(), want)


@pytest.mark.ranks(4)
def test_sharded_values_of_a_whole_target_are_gathered_and_added_ones_stay():
    torch.manual_seed(0)
    x, values, ids = torch.randn(5, 3), torch.randn(6, 3), torch.tensor([4, 0, 0, 2, 4, 1])
    target, mine, my_ids = spread(x, Replicate()), spread(values, Shard(0)), spread(ids, Shard(0))
    with CommTrace() as trace:
        target[2:] = mine[:3]
    assert trace.counts == {"all_to_all": 1, "all_gather": 1}  # of the slice, and of its values
    assert torch.equal(target.full_tensor()[2:], values[:3])
    target = spread(x, Replicate())
    with CommTrace() as trace:
        target.index_put_((my_ids,), mine, accumulate=True)
    assert trace.counts == {"all_gather": 2}
    torch.testing.assert_close(target.full_tensor(), x.index_put((ids,), values, accumulate=True))
    target = spread(x, Replicate())
    with CommTrace() as trace:
        out = target.index_put((my_ids,), mine, accumulate=True)
    assert trace.counts == {}
    assert out.layout.is_partial()
    torch.testing.assert_close(out.full_tensor(), x.index_put((ids,), values, accumulate=True))


@pytest.mark.ranks(4)
def test_values_travel_also_where_every_rank_knows_the_ids():
    x, values, ids = torch.zeros(6, 2), torch.randn(5, 2), torch.tensor([4, 0, 2, 5, 1])
    target, mine, whole = spread(x, Shard(0)), spread(values, Shard(0)).requires_grad_(), spread(ids, Replicate())
    with CommTrace() as trace:
        target[whole] = mine
    assert trace.counts == {"all_to_all": 1}
    assert torch.equal(target.full_tensor(), x.index_copy(0, ids, values))
    (target * spread(torch.arange(6.0)[:, None], Shard(0))).sum().backward()
    assert torch.equal(mine.grad.full_tensor(), ids[:, None].expand(5, 2).float())


@pytest.mark.ranks(4)
def test_a_bad_index_is_refused_on_every_rank():
    """Also on ranks that hold nothing of what it picks, so that none waits for the others."""
    write = torch.Tensor.__setitem__
    x, rows = spread(torch.zeros(5, 6), Shard(0)), spread(torch.ones(5, dtype=torch.bool), Replicate())
    too_far, ids = spread(torch.tensor([6]), Replicate()), spread(torch.arange(3), Replicate())
    empty = spread(torch.zeros(1, 6), Shard(0))
    float_ids, fifth = spread(torch.tensor([1.0]), Replicate()), spread(torch.tensor(5), Replicate())
    pair, three_rows = spread(torch.arange(2), Replicate()), spread(torch.zeros(3, 6), Replicate())
    cases = {
        "step must be greater": [lambda: x[::-1]],
        "out of": [lambda: x[5], lambda: x[fifth], lambda: x[:, too_far], lambda: empty[:, too_far]],
        "out of .*range|out of bounds": [lambda: write(x, (too_far, 0), 1.0), lambda: write(empty, (0, too_far), 1.0)],
        "shape of the mask": [lambda: x[:, rows], lambda: write(x, (slice(None), rows), 1.0)],
        "shape mismatch": [lambda: x[rows, ids], lambda: write(x, (rows, ids), 1.0), lambda: x[ids, pair]],
        "shape mismatch: value": [
            lambda: write(x, slice(1, 3), three_rows),
            lambda: x.index_put_((ids,), three_rows[None]),
        ],
        "must be long": [lambda: x[float_ids]],
        "too many": [lambda: x[0, 0, 0]],
    }
    for match, calls in cases.items():
        for call in calls:
            with pytest.raises((IndexError, ValueError, RuntimeError), match=match):
                call()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dims", [(0, 0, 1), (0, 0, None), (1, None, 0)])
def test_a_mask_over_an_axis_of_one_rank_reads_and_writes(dims):
    """Such an axis shards nothing, whatever a layout says of it."""
    layout = [Replicate() if d is None else Shard(d) for d in dims]
    target, values = torch.randn(5, 6, 3), torch.randn(int(MASK.sum()), 3)
    x, mask, added = (
        make(v.clone(), mesh_of((1, 2, 2)), placements)
        for v, placements in ((target, layout), (MASK, layout), (values, [Replicate()] * 3))
    )
    x[mask, :] = x[mask, :] + added
    target[MASK, :] += values
    torch.testing.assert_close(x.full_tensor(), target)
