"""Gradients of redistribution: the backward is the typed dual, itself a redistribution, and so on."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from dataclasses import dataclass

import pytest
import torch

from hyper_parallel import (
    CommTrace,
    DTensor,
    PackedShard,
    Partial,
    RedistributionError,
    Replicate,
    Shard,
    distribute_tensor,
)
from hyper_parallel.comm.redistribute import transition
from hyper_parallel.sharding.placements import short
from hyper_parallel.sharding.spec import contiguous_stride, dual, make_spec
from hyper_parallel.testing import make, mesh_of
from hyper_parallel.testing.layouts import Placed, tensor_placements
from hyper_parallel.testing.placing import piece_of

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@dataclass(frozen=True)
class Typed:
    """Placements, and the mesh axes on which the gradient of a replica is Partial."""

    placed: Placed
    varying: tuple[int, ...] = ()

    def on(self, mesh, ndim):
        return self.placed.layout(mesh, ndim), frozenset(self.varying)

    def __str__(self):
        kinds = [f"{short(p)}v" if a in self.varying else short(p) for a, p in enumerate(self.placed.placements)]
        return ",".join(kinds) + ("'" if self.placed.swapped else "")


def one(placement, varying=()):
    return Typed(Placed((placement,)), varying)


def local_of(value, mesh, typed, seed):
    """This rank's part of a global value in a typed layout; it needs a gradient."""
    return make(value, mesh, typed[0], requires_grad=True, seed=seed)._local


def stands_for(local, mesh, typed, value):
    """Whether the ranks' local tensors are the value in that layout."""
    layout = typed[0]
    if local.shape != torch.Size(make(value, mesh, layout).local_shape):
        return False
    if layout.is_partial():
        spec = make_spec(layout, value.shape, contiguous_stride(value.shape), value.dtype)
        with torch.no_grad():
            return torch.allclose(wrapped(local, spec).full_tensor(), value)
    return torch.allclose(local, piece_of(value, layout))


def wrapped(local, spec):
    return DTensor.from_local(local.detach(), spec.layout, shape=spec.shape)


def check_pairs(mesh_shape, shape, pairs):
    """On a rank: values, gradients and second derivatives of each pair, and the collectives of forward and backward."""
    mesh = mesh_of(mesh_shape)
    generator = torch.Generator().manual_seed(0)
    found = []
    for before, after in pairs:
        src, dst = before.on(mesh, len(shape)), after.on(mesh, len(shape))
        value, grad, tangent = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
        x = local_of(value, mesh, src, 1)
        with CommTrace() as forward:
            y = transition(x, src, dst, shape)
        seed = local_of(grad, mesh, dual(*dst), 2)
        with CommTrace() as backward:
            (dx,) = torch.autograd.grad(y, x, seed, create_graph=True)
        # The gradient is linear in the seed, and its own gradient is the forward once more.
        (again,) = torch.autograd.grad(dx, seed, local_of(tangent, mesh, src, 3))
        right = {
            "value": stands_for(y, mesh, dst, value),
            "gradient": stands_for(dx, mesh, dual(*src), grad),
            "second derivative": stands_for(again, mesh, dst, tangent),
        }
        wrong = [what for what, fine in right.items() if not fine]
        phases = {e.phase for e in forward.events} <= {"forward"}, {e.phase for e in backward.events} <= {"backward"}
        if phases != (True, True):
            wrong.append("phase in the trace")
        found.append((f"{before} -> {after}: {', '.join(wrong)}" if wrong else "", ops(forward), ops(backward)))
    return found


def ops(trace):
    return " + ".join(event.op for event in trace.events)


RV = one(R, (0,))
PACKED = one(PackedShard(0, (4, 4)))

# Forward and backward of every pair of gradient types on one axis.
PAIRS = [
    (one(S0), one(R), "all_gather", ""),
    (one(S0), RV, "all_gather", "reduce_scatter"),
    (one(S1), RV, "all_gather", "reduce_scatter"),
    (one(P), one(R), "all_reduce", ""),
    (one(P), RV, "all_reduce", "all_reduce"),
    (one(P), one(S0), "reduce_scatter", "all_gather"),
    (one(R), one(S0), "", "all_gather"),
    (one(R), one(S1), "", "all_gather"),
    (RV, one(S0), "", ""),
    (one(S0), one(S1), "all_to_all", "all_to_all"),
    (one(S0), PACKED, "all_to_all", "all_to_all"),
    (one(S0), one(P), "", ""),
    (one(R), one(P), "", ""),
    (one(R), RV, "", "all_reduce"),
    (RV, one(R), "", ""),
    (RV, one(P), "", ""),
    (PACKED, RV, "all_gather", "reduce_scatter"),
    (PACKED, one(P), "", ""),
    (one(P), PACKED, "reduce_scatter", "all_gather"),
]


@pytest.mark.parametrize(
    ("before", "after", "forward", "backward"), [pytest.param(*row, id=f"{row[0]}->{row[1]}") for row in PAIRS]
)
def test_collective_pairs(ranks, before, after, forward, backward):
    assert ranks(4, check_pairs, (4,), (8, 4), [(before, after)]) == [[("", forward, backward)]] * 4


def typed_layouts(shape, mesh_ndim):
    for placed in tensor_placements(shape, mesh_ndim, with_partial=True):
        replicated = [a for a, p in enumerate(placed.placements) if isinstance(p, Replicate)]
        for count in range(len(replicated) + 1):
            for varying in itertools.combinations(replicated, count):
                yield Typed(placed, varying)


@pytest.mark.parametrize("shape", [(), (5,), (1,), (0, 2), (3, 6)], ids=str)
def test_every_pair_on_one_axis(ranks, shape):
    pairs = list(itertools.product(typed_layouts(shape, 1), repeat=2))
    assert wrong(ranks(4, check_pairs, (4,), shape, pairs)) == set()


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (3, 2)], ids=str)
def test_pairs_on_two_axes(ranks, shape):
    pairs = list(itertools.product(typed_layouts(shape, 2), repeat=2))
    pairs = random.Random(0).sample(pairs, min(len(pairs), 250))
    assert wrong(ranks(4, check_pairs, (2, 2), shape, pairs)) == set()


def wrong(results):
    return {problem for result in results for problem, _, _ in result} - {""}


# -- on DTensors ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_gradient_lies_as_its_tensor():
    mesh, value = mesh_of((2, 2)), torch.randn(5, 3, dtype=torch.float64)
    for placements in ([S0, R], [P, S1], [S0, S0], [R, P]):
        tensor = make(value, mesh, placements, requires_grad=True)
        tensor.redistribute(placements=[R, S0]).backward(value)
        assert tensor.grad.placements == tuple(R if isinstance(p, Partial) else p for p in placements)
        torch.testing.assert_close(tensor.grad.full_tensor(), value)


@pytest.mark.ranks(4)
def test_varying_result_of_a_gather_ends_in_a_reduce_scatter():
    mesh, value = mesh_of((4,)), torch.randn(8, 2, dtype=torch.float64)
    tensor = make(value, mesh, [S0], requires_grad=True)
    with CommTrace() as trace:
        whole = tensor.redistribute(placements=[R], grad_placements=[P])
        rank = mesh.get_coordinate()[0]
        (whole.to_local() * (rank + 1.0)).sum().backward()
    assert ops(trace) == "all_gather + reduce_scatter"
    assert whole.grad_placements == (P,)
    torch.testing.assert_close(tensor.grad.full_tensor(), torch.full_like(value, 10.0))


@pytest.mark.ranks(4)
def test_averages_carry_gradients_as_sums():
    mesh = mesh_of((4,))
    local = torch.full((2,), float(mesh.get_coordinate()[0]), requires_grad=True)
    whole = DTensor.from_local(local, mesh, [Partial("avg")]).redistribute(placements=[R])
    assert whole.to_local().tolist() == [1.5, 1.5]
    whole.backward(torch.ones(2))
    assert local.grad.tolist() == [0.25, 0.25]


@pytest.mark.ranks(4)
def test_no_gradient_passes_a_maximum():
    mesh = mesh_of((4,))
    tensor = make(torch.ones(4), mesh, [Partial("max")], requires_grad=True)
    with pytest.raises(RedistributionError, match="a gradient cannot pass a pending max"):
        tensor.redistribute(placements=[R])
    with torch.no_grad():
        assert tensor.redistribute(placements=[R]).to_local().tolist() == [1.0] * 4
    with pytest.raises(RedistributionError, match=r"can only become Partial\('sum'\)"):
        make(torch.ones(4), mesh, [R], requires_grad=True).redistribute(placements=[Partial("max")])


@pytest.mark.ranks(4)
def test_errors():
    mesh, other = mesh_of((4,)), mesh_of((2, 2))
    tensor = make(torch.ones(4), mesh, [R])
    with pytest.raises(ValueError, match="redistribute stays on one mesh"):
        tensor.redistribute(other, [R, R])
    with pytest.raises(ValueError, match="2 placements"):
        tensor.redistribute(placements=[R, R])
    with pytest.raises(ValueError, match="out of range"):
        tensor.redistribute(placements=[S1])


@pytest.mark.ranks(4)
def test_nothing_to_do():
    tensor = make(torch.ones(4), mesh_of((4,)), [S0], requires_grad=True)
    assert tensor.redistribute(placements=[S0]).layout is tensor.layout
    with CommTrace() as trace:
        tensor.redistribute(placements=[S0]).backward(torch.ones(4))
    assert trace.events == []
    assert tensor.grad.to_local().tolist() == [1.0]


DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_that_not_every_backend_knows_travel(dtype):
    value = torch.arange(15.0).view(5, 3).to(dtype)
    x = distribute_tensor(value, mesh_of((2,)), [S0])  # scattered by rank 0
    for moved in (x, x.redistribute(placements=[S1]), distribute_tensor(value, mesh_of((2,)), [R])):
        assert moved.dtype == dtype
        assert torch.equal(moved.full_tensor().float(), value.float())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [R, S0], ids=short)
def test_pending_sums_of_int16_are_carried_out(placement):
    x = make(torch.arange(5, dtype=torch.int16), mesh_of((2,)), [P]).redistribute(placements=[placement])
    assert x.dtype == torch.int16
    assert x.full_tensor().tolist() == list(range(5))


class Upstream(torch.autograd.Function):
    """Identity whose node keeps something alive."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("placement", [S0, S1, P], ids=short)
def test_a_graph_ends_with_its_result(async_op, placement):
    kept = {1}
    watched = weakref.ref(kept)
    local = Upstream.apply(torch.ones(4, 6, requires_grad=True), kept)
    whole = DTensor.from_local(local, mesh_of((2,)), [placement]).redistribute(placements=[R], async_op=async_op)
    whole.to_local().sum().backward()  # without a rule for DTensors, which core has none of
    del kept, local, whole
    gc.collect()
    assert watched() is None
