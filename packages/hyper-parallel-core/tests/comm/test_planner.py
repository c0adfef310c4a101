"""From any layout to any other: values, and the collectives that it costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import CommTrace, Layout, PackedShard, Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.comm.planner import plan_transition
from hyper_parallel.comm.reduce_ops import norm_op
from hyper_parallel.sharding.placements import short
from hyper_parallel.testing import make, mesh_of
from hyper_parallel.testing.layouts import Placed, tensor_placements
from hyper_parallel.testing.placing import piece_of

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


# -- values ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One transition of a tensor of ``shape``: placements and shard order before and after."""

    shape: tuple[int, ...]
    before: tuple
    after: tuple
    order_before: dict | None = None
    order_after: dict | None = None
    dtype: torch.dtype = torch.float64

    def layouts(self, mesh):
        for placements, order in ((self.before, self.order_before), (self.after, self.order_after)):
            yield Layout.from_placements(mesh, placements, ndim=len(self.shape), shard_order=order)

    def value(self):
        return (torch.arange(math.prod(self.shape)).reshape(self.shape) + 1).to(self.dtype)

    def __str__(self):
        before, after = (",".join(map(short, p)) for p in (self.before, self.after))
        return f"{self.shape} {before} {self.order_before or ''} -> {after} {self.order_after or ''} {self.dtype}"


def wrong_moves(mesh_shape, moves):
    """On a rank: the moves whose result is not this rank's part of the value."""
    mesh = mesh_of(mesh_shape)
    wrong, pending = [], []
    for move in moves:
        src, dst = move.layouts(mesh)
        value = move.value()
        before = make(value, mesh, src)._local
        copy = before.clone()
        got = plan_transition(src, dst, move.shape).run(before)
        assert torch.equal(before, copy), f"{move}: the input was written"
        if dst.is_partial():
            pending.append((move, dst, got))
        elif not equal(got, piece_of(value, dst)):
            wrong.append(str(move))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [got for _, _, got in pending])
    for index, (move, dst, got) in enumerate(pending):
        terms = [ranks[index] for ranks, here in zip(everyone, coordinates(mesh), strict=True) if joins(dst, here)]
        whole = dst.with_placements({a: R for a, p in enumerate(dst.placements) if isinstance(p, Partial)})
        if not equal(reduced(dst, terms), piece_of(move.value(), whole)):
            wrong.append(f"{move}: {got}")
    return wrong


def coordinates(mesh):
    by_rank = {int(mesh.mesh[c]): c for c in itertools.product(*map(range, mesh.shape))}
    return [by_rank[rank] for rank in range(len(by_rank))]


def joins(layout, coordinate):
    """Whether that rank's term belongs to the pending reduction of this rank."""
    here = layout.info.my_coordinate()
    return all(isinstance(p, Partial) or coordinate[a] == here[a] for a, p in enumerate(layout.placements))


def reduced(layout, terms):
    op = next(p.reduce_op for p in layout.placements if isinstance(p, Partial))
    how = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}
    return how.get(op, torch.linalg.vector_norm)(torch.stack(terms), dim=0)


def equal(got, want):
    close = {"atol": 0.2} if got.dtype is torch.bfloat16 else {}
    return got.shape == want.shape and got.dtype == want.dtype and torch.allclose(got, want, **close)


def all_moves(shape, mesh_ndim, dtype=torch.float64):
    layouts = tensor_placements(shape, mesh_ndim, dtype.is_floating_point or dtype.is_complex)
    return [
        Move(shape, a.placements, b.placements, a.shard_order, b.shard_order, dtype)
        for a, b in itertools.product(layouts, repeat=2)
    ]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (4, 4), (3, 5), (1, 2, 3)], ids=str)
def test_every_transition_on_one_axis(ranks, shape):
    assert ranks(4, wrong_moves, (4,), all_moves(shape, 1)) == [[]] * 4


@pytest.mark.parametrize("shape", [(), (8,), (5,), (4, 6), (3, 2)], ids=str)
def test_every_transition_on_two_axes(ranks, shape):
    assert ranks(4, wrong_moves, (2, 2), all_moves(shape, 2)) == [[]] * 4


def test_other_dtypes(ranks):
    moves = all_moves((3, 4), 2, torch.int64)
    assert ranks(4, wrong_moves, (2, 2), moves) == [[]] * 4
    moves = [move for dtype in (torch.bool, torch.bfloat16, torch.complex128) for move in all_moves((5, 2), 1, dtype)]
    assert ranks(4, wrong_moves, (4,), moves) == [[]] * 4


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, torch.float32) for op in ("avg", "max", "min", "product", norm_op(2))]
    + [(op, torch.int64) for op in ("max", "min", "product")],
    ids=str,
)
def test_other_reductions(ranks, op, dtype):
    pending = Partial(op)
    ends = [R, S0, S1, PackedShard(0, (3, 2)), pending]
    moves = [Move((5, 3), (p, a), (q, b), dtype=dtype) for p in (pending, R) for a in ends for q in ends for b in ends
             if not has_two_packed(p, a) and not has_two_packed(q, b)]  # fmt: skip
    assert ranks(4, wrong_moves, (2, 2), moves) == [[]] * 4


def has_two_packed(a, b):
    return isinstance(a, PackedShard) and isinstance(b, PackedShard)


@st.composite
def moves(draw, mesh_ndim):
    """A random move on a mesh of any number of axes, with random shard orders and packed shards."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))

    def layout():
        kinds = st.one_of(st.integers(0, len(shape) - 1), st.just("R"), st.just("P"))
        drawn = [draw(kinds) for _ in range(mesh_ndim)]
        order = {d: draw(st.permutations([a for a, k in enumerate(drawn) if k == d])) for d in range(len(shape))}
        placements = [R if k == "R" else P if k == "P" else Shard(k) for k in drawn]
        for dim, axes in order.items():
            if axes and draw(st.integers(0, 3)) == 0:
                cut = draw(st.integers(0, shape[dim]))
                placements[axes[0]] = PackedShard(dim, (cut, shape[dim] - cut))
        return tuple(placements), {d: tuple(axes) for d, axes in order.items()}

    (before, order_before), (after, order_after) = layout(), layout()
    return Move(shape, before, after, order_before, order_after)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_random_transitions(ranks, mesh_shape):
    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(st.lists(moves(len(mesh_shape)), min_size=1, max_size=8))
    def check(drawn):
        assert ranks(4, wrong_moves, mesh_shape, drawn) == [[]] * 4

    check()


def test_random_transitions_on_three_axes(ranks):
    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(st.lists(moves(3), min_size=6, max_size=12))
    def check(drawn):
        assert ranks(8, wrong_moves, (2, 2, 2), drawn) == [[]] * 8

    check()


# -- what it costs --------------------------------------------------------------------------------------------------


def moved_by(mesh_shape, shape, before, after, dtype=torch.float32):
    """On a rank: the collectives of one move as (op, bytes, ranks)."""
    mesh = mesh_of(mesh_shape)
    layouts = [
        given.layout(mesh, len(shape))
        if isinstance(given, Placed)
        else Layout.from_placements(mesh, given, ndim=len(shape))
        for given in (before, after)
    ]
    tensor = make(torch.zeros(shape, dtype=dtype), mesh, layouts[0])
    with CommTrace() as trace:
        tensor.redistribute(layouts[1])
    return [(event.op, event.nbytes, event.ranks) for event in trace.events]


def op(name, nbytes, ranks):
    return (f"all_{name}" if name in ("reduce", "gather", "to_all") else name, nbytes, ranks)


PS = PackedShard(0, (4, 4))

# Before, after, and what it takes, for float32[8, 4] (128 bytes) over 4 ranks.
ONE_AXIS = [
    (S0, R, [op("gather", 128, 4)]),
    (S1, R, [op("gather", 128, 4)]),
    (PS, R, [op("gather", 128, 4)]),
    (P, R, [op("reduce", 128, 4)]),
    (Partial("max"), R, [op("reduce", 128, 4)]),
    (Partial("avg"), R, [op("reduce", 128, 4)]),
    (P, S0, [op("reduce_scatter", 128, 4)]),
    (P, S1, [op("reduce_scatter", 128, 4)]),
    (P, PS, [op("reduce_scatter", 128, 4)]),
    (P, Partial("max"), [op("reduce", 128, 4)]),
    (S0, S1, [op("to_all", 32, 4)]),
    (S1, S0, [op("to_all", 32, 4)]),
    (S0, PS, [op("to_all", 32, 4)]),
    (PS, S1, [op("to_all", 32, 4)]),
    (S0, Partial("max"), [op("gather", 128, 4)]),
    (R, S0, []),
    (R, S1, []),
    (R, PS, []),
    (R, P, []),
    (R, Partial("max"), []),
    (S0, P, []),
    (S1, P, []),
    (PS, P, []),
]  # fmt: skip

SWAPPED = Placed((S0, S0), swapped=True)
PS2 = PackedShard(0, (2, 2))

# The same for float32[4, 4] (64 bytes) over 2 x 2 ranks.
TWO_AXES = [
    # Axes are reduced and gathered together.
    ((P, P), (R, R), [op("reduce", 64, 4)]),
    ((P, P), (S0, S0), [op("reduce_scatter", 64, 4)]),
    ((P, P), SWAPPED, [op("reduce_scatter", 64, 4)]),
    ((P, P), (S0, S1), [op("reduce_scatter", 64, 2), op("reduce_scatter", 32, 2)]),
    ((P, P), (S0, R), [op("reduce_scatter", 64, 2), op("reduce", 32, 2)]),
    ((S0, S0), (R, R), [op("gather", 64, 4)]),
    ((S0, S1), (R, R), [op("gather", 64, 4)]),
    (SWAPPED, (R, R), [op("gather", 64, 4)]),
    ((S0, S0), (S0, R), [op("gather", 32, 2)]),
    ((S0, S1), (S0, R), [op("gather", 32, 2)]),
    ((PS2, S0), (PS2, R), [op("gather", 32, 2)]),
    # What is sliced anyway is sliced before it is reduced or moved.
    ((R, P), (S0, R), [op("reduce", 32, 2)]),
    ((R, P), (S0, S0), [op("reduce_scatter", 32, 2)]),
    ((R, P), (S0, S1), [op("reduce_scatter", 32, 2)]),
    ((S0, P), (S0, R), [op("reduce", 32, 2)]),
    ((S0, P), (S0, S1), [op("reduce_scatter", 32, 2)]),
    ((S0, P), (R, R), [op("reduce", 32, 2), op("gather", 64, 2)]),
    ((R, S0), (S0, S1), [op("to_all", 16, 4)]),
    # A change of order or of dims is one exchange.
    (SWAPPED, (S0, S0), [op("to_all", 16, 4)]),
    ((S0, S1), (S1, S0), [op("to_all", 16, 4)]),
    ((S0, S0), (S1, S1), [op("to_all", 16, 4)]),
    ((S0, S1), (S0, S0), [op("to_all", 16, 2)]),
    ((S0, R), (S1, R), [op("to_all", 32, 2)]),
    ((PS2, R), (S0, R), [op("to_all", 32, 2)]),
    # A pending sum that stays does not travel, and keeps no other axis from moving.
    ((S0, P), (R, P), [op("gather", 64, 2)]),
    ((S0, P), (S1, P), [op("to_all", 32, 2)]),
    # Free.
    ((R, R), (S0, S1), []),
    ((R, R), SWAPPED, []),
    ((S0, R), (S0, S0), []),
    ((R, R), (P, S0), []),
    ((S0, R), (P, R), []),
    ((S0, S1), (P, P), []),
    ((P, R), (P, S0), []),
]  # fmt: skip


def name(given):
    return str(given) if isinstance(given, Placed) else ",".join(map(short, given))


@pytest.mark.parametrize(
    ("before", "after", "wanted"), [pytest.param((b,), (a,), w, id=f"{short(b)}->{short(a)}") for b, a, w in ONE_AXIS]
)
def test_collectives_on_one_axis(ranks, before, after, wanted):
    assert ranks(4, moved_by, (4,), (8, 4), before, after) == [wanted] * 4


@pytest.mark.parametrize(
    ("before", "after", "wanted"), [pytest.param(b, a, w, id=f"{name(b)}->{name(a)}") for b, a, w in TWO_AXES]
)
def test_collectives_on_two_axes(ranks, before, after, wanted):
    assert ranks(4, moved_by, (2, 2), (4, 4), before, after) == [wanted] * 4


def test_axes_of_one_rank_cost_nothing(ranks):
    assert ranks(4, moved_by, (4, 1), (8, 4), (R, P), (R, R)) == [[]] * 4
    assert ranks(4, moved_by, (4, 1), (8, 4), (S0, S1), (S0, R)) == [[]] * 4
    assert ranks(4, moved_by, (4, 1), (8, 4), (S0, S0), (R, S1)) == [[op("gather", 128, 4)]] * 4


def test_uneven_shards_travel_padded_only_where_the_collective_needs_it(ranks):
    """float32[5, 4]: pieces of 2, 2, 1 and 0 rows. A gather pads each to 2 rows, an exchange sends what there is."""
    assert ranks(4, moved_by, (4,), (5, 4), (S0,), (R,))[0] == [op("gather", 4 * 2 * 4 * 4, 4)]
    assert ranks(4, moved_by, (4,), (5, 4), (P,), (S0,))[0] == [op("reduce_scatter", 4 * 2 * 4 * 4, 4)]
    sizes = [moved[0][1] for moved in ranks(4, moved_by, (4,), (5, 4), (S0,), (S1,))]
    assert sizes == [32, 32, 20, 20]  # the larger of what a rank sends and receives


# -- the trace, dtypes on the wire, and results in flight -----------------------------------------------------------


@pytest.mark.ranks(4)
def test_event_tells_what_and_where():
    tensor = make(torch.zeros(4, 4), mesh_of((2, 2)), [S0, P])
    with CommTrace() as trace:
        tensor.redistribute(placements=[S0, R])
    (event,) = trace.events
    assert (event.op, event.axes, event.ranks, event.phase) == ("all_reduce", (1,), 2, "forward")
    assert event.change == "S(0),P(sum) -> S(0),R"
    assert event.where.rpartition(":")[0].endswith("test_planner.py")
    assert trace.counts == {"all_reduce": 1}
    assert trace.nbytes == 32
    assert "all_reduce" in str(trace)
    assert event.axis_names == (event.mesh_axes[1],)


@pytest.mark.ranks(4)
def test_event_names_the_axes_of_its_own_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    with CommTrace() as trace:
        for part, placements in ((mesh, [R, P]), (mesh["tp"], [P]), (mesh["fsdp"], [S0]), (mesh, [P, P])):
            make(torch.zeros(4, 4), part, placements).redistribute(placements=[R] * part.ndim)
    assert [e.axis_names for e in trace.events] == [("tp",), ("tp",), ("fsdp",), ("fsdp", "tp")]
    assert [c.mesh_axes for c in trace.changes] == [("fsdp", "tp"), ("tp",), ("fsdp",), ("fsdp", "tp")]
    assert [line.split()[2] for line in str(trace).splitlines()] == ["AXES", "tp", "tp", "fsdp", "fsdp,tp"]


@pytest.mark.ranks(4)
def test_dtype_on_the_wire():
    value = torch.rand(8, 4)
    tensor = make(value, mesh_of((4,)), [S0], requires_grad=True)
    with CommTrace() as trace:
        out = tensor.redistribute(placements=[R], grad_placements=[P], wire_dtype=torch.bfloat16)
        out.backward(torch.ones(8, 4))
    assert [(e.op, e.nbytes) for e in trace.events] == [("all_gather", 64), ("reduce_scatter", 128)]
    assert out.dtype is torch.float32
    assert torch.equal(out.to_local(), value.bfloat16().float())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("after", [(R, R), (S1, S0), (S0, R), (R, S0), (P, S1)], ids=name)
@pytest.mark.parametrize("before", [(S0, S0), (P, P), (S0, P), (PS2, S1)], ids=name)
def test_result_in_flight(before, after):
    mesh, value = mesh_of((2, 2)), torch.rand(5, 4)
    before = tuple(PackedShard(0, (3, 2)) if p == PS2 else p for p in before)
    tensor = make(value, mesh, before, requires_grad=True)
    out = tensor.redistribute(placements=after, async_op=True)
    torch.testing.assert_close(out.full_tensor(), value)
    out = tensor.redistribute(placements=after, async_op=True)
    out.backward(2 * value)
    torch.testing.assert_close(tensor.grad.full_tensor(), 2 * value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("placement", [Replicate(), Partial()], ids=["gather", "reduce_scatter"])
def test_pieces_in_another_memory_order(dim, placement):
    """Collectives send memory as it lies, and torch.cat keeps channels_last."""
    value = torch.arange(2.0 * 4 * 6 * 8).view(2, 4, 6, 8)
    mesh = mesh_of((2,))
    source, target = ([Shard(dim)], [Replicate()]) if placement == Replicate() else ([Partial()], [Shard(dim)])
    layouts = [Layout.from_placements(mesh, p, ndim=4) for p in (source, target)]
    local = piece_of(value, layouts[0]) if placement == Replicate() else value
    plan = plan_transition(*layouts, tuple(value.shape))
    got = plan.run(local.contiguous(memory_format=torch.channels_last))
    want = value if placement == Replicate() else 2 * piece_of(value, layouts[1])
    torch.testing.assert_close(got, want)
