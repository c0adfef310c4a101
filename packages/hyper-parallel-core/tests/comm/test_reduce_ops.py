"""Pending reductions that travel in another form: extremes with NaN, and p-norms."""

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.comm.reduce_ops import norm_op, norm_order, wire


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["max", "min"])
def test_order_of_floats_is_kept(op, dtype):
    x = torch.tensor([-torch.inf, -3.5, -0.0, 0.0, 1e-7, 2.0, torch.inf], dtype=dtype)
    form = wire(op, dtype)
    sent = form.encode(x)
    assert (sent[1:] >= sent[:-1]).all()
    assert torch.equal(form.decode(sent), x)
    nan = form.encode(torch.tensor([torch.nan, -torch.nan], dtype=dtype))
    assert (nan > sent.max()).all() if op == "max" else (nan < sent.min()).all()
    assert form.decode(nan).isnan().all()


def test_names_of_norms():
    assert norm_order(norm_op(2)) == 2.0
    assert norm_order("sum") is None
    assert wire("sum", torch.float32).encode is None


def reduced(op, async_op):
    """Each rank's term, reduced to whole and to slices."""
    mesh = init_device_mesh("cpu", (4,))
    rank = torch.distributed.get_rank()
    terms = torch.arange(24.0).view(4, 6).roll(1, 0) - 9
    terms[2, 1], terms[0, 3] = torch.nan, -torch.inf
    if op.startswith("norm"):
        terms = terms.nan_to_num(neginf=0).abs()
    mine = DTensor.from_local(terms[rank].clone(), mesh, [Partial(op)])
    whole = mine.redistribute(placements=[Replicate()], async_op=async_op)
    slices = mine.redistribute(placements=[Shard(0)], async_op=async_op)
    again = whole.redistribute(placements=[Partial(op)])
    return terms, whole.to_local(), slices.full_tensor(), again.full_tensor()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("op", ["max", "min", "norm2.0", "norm3.0"])
def test_reduced(ranks, op, async_op):
    for terms, *found in ranks(4, reduced, op, async_op):
        if op.startswith("norm"):
            want = torch.linalg.vector_norm(terms, norm_order(op), 0)
        else:
            want = getattr(terms, f"a{op}")(0)
        for got in found:
            torch.testing.assert_close(torch.as_tensor(got), want, equal_nan=True)
