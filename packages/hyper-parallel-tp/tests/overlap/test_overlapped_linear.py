"""Linear layers in pieces: equal to the plain path, in as many bytes, and computing while they communicate."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    PackedShard,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    Shard,
    all_gather_linear,
    distribute_tensor,
    init_device_mesh,
    linear_reduce_scatter,
    parallelize_module,
)
from hyper_parallel.errors import RedistributionError
from hyper_parallel_tp.overlap.overlapped_linear import _gathered

R = Replicate()
IN, OUT = 6, 10
MESHES = {"tp": ((4,), ()), "dp, tp": ((2, 2), (Shard(0),)), "idle, tp": ((2, 2), (R,))}


def leaf(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(value, mesh, *placements):
    made = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
    return made.requires_grad_()


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def backward(out):
    """A gradient that differs everywhere."""
    seed = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    out.backward(seed if type(out) is torch.Tensor else spread(seed, out.device_mesh, *out.placements).detach())


def check(out, tensors, plain, plain_out):
    torch.testing.assert_close(out.full_tensor().detach(), plain_out.detach())
    backward(out)
    for got, want in zip(tensors, plain, strict=True):
        assert got.grad.layout is got.layout
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


def plain_linear(sequence, with_bias):
    x, w = leaf(2, sequence, IN, seed=1), leaf(OUT, IN, seed=2)
    plain = [t.requires_grad_() for t in (x, w, *([leaf(OUT, seed=3)] if with_bias else []))]
    out = F.linear(*plain)
    backward(out)
    return plain, out


@pytest.mark.ranks(4)
@pytest.mark.parametrize("pieces", [1, 2, 3, 100])
@pytest.mark.parametrize("sequence", [16, 13, 5, 2, 1])  # even, uneven, an empty shard, more
@pytest.mark.parametrize("name", MESHES)
def test_both_equal_one_device(name, sequence, pieces):
    shape, outer = MESHES[name]
    mesh, rest = mesh_of(shape), [R] * len(outer)
    for with_bias in (True, False):
        plain, want = plain_linear(sequence, with_bias)
        x = spread(plain[0], mesh, *outer, Shard(1))
        column = [x, *(spread(t, mesh, *rest, Shard(0)) for t in plain[1:])]
        out = all_gather_linear(*column, pieces=pieces)
        assert out.placements == (*outer, Shard(2))
        check(out, column, plain, want)
        row = [spread(plain[0], mesh, *outer, Shard(2)), spread(plain[1], mesh, *rest, Shard(1))]
        row += [spread(t, mesh, *rest, R) for t in plain[2:]]
        out = linear_reduce_scatter(*row, dim=1, pieces=pieces)
        assert out.placements == (*outer, Shard(1))
        check(out, row, plain, want)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dim", [0, -3])
def test_the_first_dim_may_be_the_sequence(dim):
    plain, want = plain_linear(4, False)
    mesh = mesh_of((4,))
    row = [spread(plain[0], mesh, Shard(2)), spread(plain[1], mesh, Shard(1))]
    check(linear_reduce_scatter(*row, dim=dim), row, plain, want)
    plain, want = plain_linear(4, True)
    column = [spread(plain[0], mesh, Shard(0)), *(spread(t, mesh, Shard(0)) for t in plain[1:])]
    check(all_gather_linear(*column), column, plain, want)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("used", [(0, 1, 2), (0,), (1, 2)])  # by the loss
@pytest.mark.parametrize("name", MESHES)
def test_layers_that_share_an_input_gather_it_once(name, used):
    shape, outer = MESHES[name]
    mesh, rest = mesh_of(shape), [R] * len(outer)
    plain = [leaf(2, 13, IN, seed=1).requires_grad_(), *(leaf(OUT, IN, seed=s).requires_grad_() for s in (2, 3, 4))]
    x, *weights = spread(plain[0], mesh, *outer, Shard(1)), *(spread(w, mesh, *rest, Shard(0)) for w in plain[1:])
    with CommTrace() as trace:
        outs = [all_gather_linear(x, w, pieces=2) for w in weights]
        loss = sum(outs[i].pow(2).sum() for i in used)
        loss.backward()
    for out, w in zip(outs, plain[1:], strict=True):
        torch.testing.assert_close(out.full_tensor(), F.linear(plain[0], w))
    sum(F.linear(plain[0], plain[1 + i]).pow(2).sum() for i in used).backward()
    assert trace.phase("forward")["all_gather"] == 2
    assert trace.phase("backward")["reduce_scatter"] == 2
    for got, want in zip((x, *weights), plain, strict=True):
        if want.grad is not None:
            torch.testing.assert_close(got.grad.full_tensor(), want.grad)
        else:
            assert got.grad is None or not got.grad.any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backwards", [0, 1])
def test_what_was_gathered_goes_with_its_input(backwards):
    x, w = (
        spread(leaf(2, 4, IN, seed=1), mesh_of((2,)), Shard(1)) * 1,
        spread(leaf(OUT, IN, seed=2), mesh_of((2,)), Shard(0)),
    )
    outs = [all_gather_linear(x, w), all_gather_linear(x, w)]
    held = weakref.ref(_gathered[x].tensor.to_local())
    for _ in range(backwards):
        sum(out.sum() for out in outs).backward()
    assert held() is not None
    del x, outs
    assert held() is None


@pytest.mark.ranks(4)
def test_packed_projections():
    plain, want = plain_linear(8, True)
    mesh, packed = mesh_of((4,)), (4, 4, 2)
    column = [spread(plain[0], mesh, Shard(1)), *(spread(t, mesh, PackedShard(0, packed)) for t in plain[1:])]
    out = all_gather_linear(*column)
    assert out.placements == (PackedShard(2, packed),)
    check(out, column, plain, want)
    plain, want = plain_linear(8, False)
    sections = (4, 2)
    row = [spread(plain[0], mesh, PackedShard(2, sections)), spread(plain[1], mesh, PackedShard(1, sections))]
    check(linear_reduce_scatter(*row), row, plain, want)


@pytest.mark.ranks(4)
def test_frozen_weights_and_inputs_cost_only_what_is_asked_for():
    mesh = mesh_of((4,))
    plain, _ = plain_linear(8, False)
    for frozen, (forward, back) in {0: (2, 0), 1: (2, 2)}.items():
        column = [spread(plain[0], mesh, Shard(1)), spread(plain[1], mesh, Shard(0))]
        column[frozen].requires_grad_(False)
        with CommTrace() as trace:
            backward(all_gather_linear(*column))
        assert trace.phase("forward") == {"all_gather": forward}
        assert trace.phase("backward").get("reduce_scatter", 0) == back
        torch.testing.assert_close(column[1 - frozen].grad.full_tensor(), plain[1 - frozen].grad)


def costs(pieces):
    """Counts and bytes, in pieces and plain."""
    mesh = mesh_of((4,))
    plain, _ = plain_linear(16, False)
    column = [spread(plain[0], mesh, Shard(1)), spread(plain[1], mesh, Shard(0))]
    row = [spread(plain[0], mesh, Shard(2)), spread(plain[1], mesh, Shard(1))]
    results = []
    for run in (
        lambda: all_gather_linear(*column, pieces=pieces),
        lambda: F.linear(column[0].redistribute(placements=[R]), column[1]),
        lambda: linear_reduce_scatter(*row, pieces=pieces),
        lambda: F.linear(*row).redistribute(placements=[Shard(1)]),
    ):
        with CommTrace() as trace:
            backward(run())
        results.append((dict(trace.phase("forward")), dict(trace.phase("backward")), trace.nbytes))
    return results


def test_the_same_bytes_in_as_many_collectives_as_pieces(ranks):
    for in_pieces, whole, row_pieces, row_whole in ranks(4, costs, 2):
        assert in_pieces[:2] == ({"all_gather": 2}, {"reduce_scatter": 2})
        assert whole[:2] == ({"all_gather": 1}, {"reduce_scatter": 1})
        assert row_pieces[:2] == ({"reduce_scatter": 2}, {"all_gather": 2})
        assert in_pieces[2] == whole[2]
        assert row_pieces[2] == row_whole[2]


@pytest.mark.ranks(4)
def test_autocast():
    mesh = mesh_of((4,))
    plain, want = plain_linear(8, True)
    column = [spread(plain[0].float(), mesh, Shard(1)), *(spread(t.float(), mesh, Shard(0)) for t in plain[1:])]
    with torch.autocast("cpu", torch.bfloat16):
        out = all_gather_linear(*column)
        row = linear_reduce_scatter(spread(plain[0].float(), mesh, Shard(2)), spread(plain[1].float(), mesh, Shard(1)))
    assert (out.dtype, row.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(out.full_tensor().double(), want.detach(), rtol=0.05, atol=0.05)
    out.float().sum().backward()
    assert [t.grad.dtype for t in column] == [torch.float32] * 3
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        wide = all_gather_linear(spread(plain[0], mesh, Shard(1)), spread(plain[1], mesh, Shard(0)))
    assert wide.dtype is torch.float64


@pytest.mark.ranks(4)
@pytest.mark.parametrize("used", [(0, 1, 2), (1, 2)])  # by the loss
def test_layers_that_share_an_input_gather_it_once_under_autocast(used):
    """In the low precision: half of the bytes. Outside of autocast, or back inside, it is gathered as that needs it."""
    mesh = mesh_of((4,))
    plain = [leaf(2, 13, IN, seed=1), *(leaf(OUT, IN, seed=s) for s in (2, 3, 4))]
    plain = [t.float().requires_grad_() for t in plain]
    x, *weights = spread(plain[0], mesh, Shard(1)), *(spread(w, mesh, Shard(0)) for w in plain[1:])
    with CommTrace() as trace:
        with torch.autocast("cpu", torch.bfloat16):
            outs = [all_gather_linear(x, w, pieces=2) for w in weights]
        sum(outs[i].float().pow(2).sum() for i in used).backward()
    assert trace.counts == {"all_gather": 2, "reduce_scatter": 2}
    with torch.autocast("cpu", torch.bfloat16):
        wanted = [F.linear(plain[0], w) for w in plain[1:]]
    sum(wanted[i].float().pow(2).sum() for i in used).backward()
    for out, want in zip(outs, wanted, strict=True):
        torch.testing.assert_close(out.full_tensor(), want)
    for got, want in zip((x, *weights), plain, strict=True):
        if want.grad is not None:
            torch.testing.assert_close(
                got.grad.full_tensor(), want.grad, rtol=0.02, atol=0.02 * want.grad.abs().max().item()
            )
    with CommTrace() as trace, torch.no_grad():
        for low, expected in ((True, torch.bfloat16), (False, torch.float32), (True, torch.bfloat16)):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                outs = [all_gather_linear(x, w, pieces=2) for w in weights]
            assert {out.dtype for out in outs} == {expected}
    assert trace.counts == {"all_gather": 6}


def refusals():
    mesh, two = mesh_of((4,)), mesh_of((2, 2))
    x, w = leaf(2, 8, IN, seed=1), leaf(OUT, IN, seed=2)
    calls = {
        "weight": lambda: all_gather_linear(spread(x, mesh, Shard(1)), spread(w, mesh, R)),
        "two axes": lambda: all_gather_linear(spread(x, two, R, Shard(1)), spread(w, two, Shard(0), Shard(0))),
        "features": lambda: all_gather_linear(spread(x, mesh, Shard(2)), spread(w, mesh, Shard(0))),
        "whole": lambda: all_gather_linear(spread(x, mesh, R), spread(w, mesh, Shard(0))),
        "other mesh": lambda: all_gather_linear(spread(x, two, R, Shard(1)), spread(w, mesh, Shard(0))),
        "sequence twice": lambda: all_gather_linear(spread(x, two, Shard(1), Shard(1)), spread(w, two, R, Shard(0))),
        "row input": lambda: linear_reduce_scatter(spread(x, mesh, Shard(1)), spread(w, mesh, Shard(1))),
        "row weight": lambda: linear_reduce_scatter(spread(x, mesh, Shard(2)), spread(w, mesh, Shard(0))),
        "dim": lambda: linear_reduce_scatter(spread(x, mesh, Shard(2)), spread(w, mesh, Shard(1)), dim=2),
        "sharded dim": lambda: linear_reduce_scatter(
            spread(x, two, Shard(1), Shard(2)), spread(w, two, R, Shard(1)), dim=1
        ),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(RedistributionError) as caught:
            call()
        found[name] = str(caught.value)
    with pytest.raises(ValueError, match="pieces=0"):
        all_gather_linear(spread(x, mesh, Shard(1)), spread(w, mesh, Shard(0)), pieces=0)
    with pytest.raises(IndexError):
        linear_reduce_scatter(spread(x, mesh, Shard(2)), spread(w, mesh, Shard(1)), dim=3)
    return found


def test_other_layouts_are_refused_alike_on_every_rank(ranks):
    found = ranks(4, refusals)
    assert all(f == found[0] for f in found)
    assert "Shard(0) over one mesh axis" in found[0]["weight"]
    assert "Shard(1) over one mesh axis" in found[0]["row weight"]


# -- as styles ----------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(IN, 12, dtype=torch.float64)
        self.down = nn.Linear(12, IN, dtype=torch.float64)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


def styled(mesh, pieces):
    torch.manual_seed(1)
    sequence = Shard(1)
    return parallelize_module(
        Mlp(),
        mesh,
        {
            "up": ColwiseParallel(input_layouts=sequence, use_local_output=False, overlap_pieces=pieces),
            "down": RowwiseParallel(output_layouts=sequence, overlap_pieces=pieces),
        },
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("copied", [False, True])
def test_styles_in_pieces(copied):
    mesh = mesh_of((4,))
    torch.manual_seed(1)
    plain, x = Mlp(), leaf(2, 8, IN, seed=4).requires_grad_()
    want = plain(x)
    backward(want)
    for pieces, count in ((None, 1), (2, 2)):
        made = styled(mesh, pieces)
        if copied:
            made = copy.deepcopy(made)
        mine = spread(x, mesh, Shard(1)).to_local().detach().requires_grad_()
        with CommTrace() as trace:
            out = made(mine)
        assert trace.counts == {"all_gather": count, "reduce_scatter": count}
        torch.testing.assert_close(out.detach(), spread(want, mesh, Shard(1)).to_local())
        seed = torch.linspace(1, 2, want.numel(), dtype=want.dtype).view(want.shape)
        out.backward(spread(seed, mesh, Shard(1)).to_local())
        torch.testing.assert_close(mine.grad, spread(x.grad, mesh, Shard(1)).to_local())
        for got, single in zip(made.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), single.grad)


def test_styles_say_what_pieces_need():
    with pytest.raises(ValueError, match="needs input_layouts=Shard"):
        ColwiseParallel(overlap_pieces=2)
    with pytest.raises(ValueError, match="needs output_layouts=Shard"):
        RowwiseParallel(output_layouts=Shard(-1), overlap_pieces=2)
    with pytest.raises(ValueError, match="1 or more"):
        RowwiseParallel(output_layouts=Shard(1), overlap_pieces=0)


@pytest.mark.ranks(2)
def test_only_a_linear_is_cut():
    style = RowwiseParallel(input_layouts=R, output_layouts=Shard(1), overlap_pieces=2)
    with pytest.raises(TypeError, match=r"nn\.Linear by itself"):
        parallelize_module(nn.Embedding(8, 4), mesh_of((2,)), style)


# -- evidence of overlap ------------------------------------------------------------------------------------------


def busy_while_communicating(run):
    """Microseconds in which this rank multiplied while a collective of its own was in flight, by the profiler."""
    run()  # makes plans and connections
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(4):  # on a busy machine a rank may sleep through one collective
            run()
    events = [(e.name, e.time_range.start, e.time_range.end) for e in trace.events()]
    moving = [(a, b) for name, a, b in events if name.startswith("gloo:")]
    products = [(a, b) for name, a, b in events if name in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert moving, "the trace shows no collective"
    assert products, "the trace shows no product"
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in moving for c, d in products)


class Independent(nn.Module):
    """A projection of the input, and before it one of something else."""

    def __init__(self):
        super().__init__()
        self.other, self.own = nn.Linear(256, 512), nn.Linear(256, 512)

    def forward(self, x, other):
        return self.other(other), self.own(x)


def overlap_times():
    mesh = mesh_of((2,))
    x, w = torch.randn(4, 512, 256), torch.randn(512, 256)
    back = torch.randn(4, 512, 512)
    column = spread(x, mesh, Shard(1)), spread(w, mesh, Shard(0))
    row = spread(back, mesh, Shard(2)), spread(torch.randn(256, 512), mesh, Shard(1))
    runs = {
        "gather, in pieces": lambda: all_gather_linear(*column, pieces=4).sum().backward(),
        "backward, in one piece": lambda: all_gather_linear(*column, pieces=1).sum().backward(),
        "gather, plain": lambda: F.linear(column[0].redistribute(placements=[R]), column[1]).sum().backward(),
        "scatter, in pieces": lambda: linear_reduce_scatter(*row, pieces=4).sum().backward(),
        "scatter, plain": lambda: F.linear(*row).redistribute(placements=[Shard(1)]).sum().backward(),
    }
    prepare = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(R,))
    module = parallelize_module(Independent(), mesh, {"": prepare, "own": ColwiseParallel()})
    shard, other = torch.randn(4, 256, 256), torch.randn(4, 512, 256)
    with torch.no_grad():
        # A clone: what was gathered of a tensor is remembered.
        times = {"independent": busy_while_communicating(lambda: module(shard.clone(), other))}
    return times | {name: busy_while_communicating(run) for name, run in runs.items()}


def test_the_profiler_sees_products_while_pieces_travel(ranks):
    """And independent ones while an input is gathered. On the plain path never: it waits for what it asked for."""
    for times in ranks(2, overlap_times, timeout=300):
        assert times["gather, in pieces"] > 0, times
        assert times["scatter, in pieces"] > 0, times
        assert times["backward, in one piece"] > 0, times  # the weight's gradient
        assert times["independent"] > 0, times
        assert times["gather, plain"] == times["scatter, plain"] == 0, times
