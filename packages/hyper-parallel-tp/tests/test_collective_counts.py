"""What a decoder layer communicates, forward and backward, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tp_models import Attention, Block, Mlp, check_gradients, mesh, twins

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    DTensor,
    NoParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)

R, S1 = Replicate(), Shard(1)


def block_plan(local):
    """Norms and the residual stream outside of the styles (local), or all of it DTensors."""
    col, row = ColwiseParallel(use_local_output=local), RowwiseParallel(use_local_output=local)
    plan = {"attention.[qkv]": col, "attention.o": row, "mlp.gate": col, "mlp.up": col, "mlp.down": row}
    return plan if local else {**plan, "": NoParallel()}


def sequence_plan(local, gather_in_block):
    """Sequence parallel; the gather is that of the block, or that of each projection."""
    col = ColwiseParallel(input_layouts=S1, use_local_output=local)
    row = RowwiseParallel(output_layouts=S1, use_local_output=local)
    plan = {"attention.[qkv]": col, "attention.o": row, "mlp.gate": col, "mlp.up": col, "mlp.down": row}
    plan |= {"norm1": SequenceParallel(use_local_output=local), "norm2": SequenceParallel(use_local_output=local)}
    if gather_in_block:
        gather = PrepareModuleInput(input_layouts=(S1,), desired_input_layouts=(R,))
        plan |= {"attention": gather, "mlp": gather}
    return plan


def count(model, x):
    with CommTrace() as trace:
        out = model(x)
        out.backward(torch.ones_like(out))
    return trace.phase("forward"), trace.phase("backward"), out


@pytest.mark.ranks(2)
@pytest.mark.parametrize("local", [True, False])
def test_a_layer_costs_two_all_reduces_each_way(local):
    model, twin = twins(Block)
    parallelize_module(model, mesh(), block_plan(local))
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    xg, yg = (x.clone().requires_grad_() for _ in range(2))
    forward, backward, out = count(model, xg * 1)
    want = twin(yg)
    want.backward(torch.ones_like(want))
    assert forward == {"all_reduce": 2}
    assert backward == {"all_reduce": 2}
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(xg.grad, yg.grad)
    check_gradients(model, twin)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gather_in_block", [True, False])
@pytest.mark.parametrize("length", [4, 5])
def test_a_sequence_parallel_layer_costs_two_gathers_and_two_scatters_each_way(gather_in_block, length):
    model, twin = twins(Block)
    parallelize_module(model, mesh(), sequence_plan(False, gather_in_block))
    x = torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    xg, yg = distribute_tensor(x, mesh(), [S1]).requires_grad_(), x.clone().requires_grad_()
    forward, backward, out = count(model, xg * 1)
    want = twin(yg)
    want.backward(torch.ones_like(want))
    assert forward == {"all_gather": 2, "reduce_scatter": 2}
    # and the gradient of each of the two norm weights
    assert backward == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2}
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(xg.grad.full_tensor(), yg.grad)
    check_gradients(model, twin)


def pieces_plan():
    """A sequence-parallel plan whose projections multiply while they communicate; one piece each."""
    plan = sequence_plan(False, gather_in_block=False)
    for name in ("attention.[qkv]", "mlp.gate", "mlp.up"):
        plan[name] = ColwiseParallel(input_layouts=S1, use_local_output=False, overlap_pieces=1)
    for name in ("attention.o", "mlp.down"):
        plan[name] = RowwiseParallel(output_layouts=S1, use_local_output=False, overlap_pieces=1)
    return plan


SCATTERED = {"all_gather": 2, "reduce_scatter": 2}
UNDER_AUTOCAST = {
    "plain": (lambda: block_plan(True), {"all_reduce": 2}),
    "DTensors": (lambda: block_plan(False), {"all_reduce": 2}),
    "sequence, gathered by the block": (lambda: sequence_plan(False, True), SCATTERED),
    "sequence, gathered by projections": (lambda: sequence_plan(False, False), SCATTERED),
    "in pieces": (pieces_plan, SCATTERED),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_a_layer_under_autocast_costs_no_more(name):
    plan, costs = UNDER_AUTOCAST[name]
    model, twin = twins(Block, dtype=torch.float32)
    parallelize_module(model, mesh(), plan())
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    given = x if name == "plain" else distribute_tensor(x, mesh(), [S1 if costs is SCATTERED else R])
    with torch.autocast("cpu", torch.bfloat16):
        forward, backward, out = count(model, given.clone().requires_grad_() * 1)
        want = twin(x)
    assert forward == costs
    norms = {"all_reduce": 2} if costs is SCATTERED else {}  # the gradient of each norm's weight
    assert backward == {**costs, **norms}
    out = out.full_tensor() if isinstance(out, DTensor) else out
    torch.testing.assert_close(out, want, rtol=0.05, atol=0.05)


@pytest.mark.ranks(2)
def test_projections_share_the_gather_of_a_plain_piece():
    model, twin = twins(Attention)
    plan = {"[qkv]": ColwiseParallel(input_layouts=S1), "o": RowwiseParallel(output_layouts=S1)}
    parallelize_module(model, mesh(), plan)
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    piece = x.chunk(2, 1)[mesh().get_local_rank()].clone().requires_grad_()
    y = x.clone().requires_grad_()
    projections = [model.q, model.k, model.v]
    with CommTrace() as trace:
        shared = piece * 1
        outs = [p(shared) for p in projections]
        sum(o.pow(2).sum() for o in outs).backward()
    want = [p(y) for p in (twin.q, twin.k, twin.v)]
    sum(o.pow(2).sum() for o in want).backward()
    assert trace.phase("forward") == {"all_gather": 1}
    assert trace.phase("backward") == {"reduce_scatter": 1}
    torch.testing.assert_close(DTensor.from_local(piece.grad, mesh(), [S1]).full_tensor(), y.grad)


@pytest.mark.ranks(2)
def test_what_a_tensor_was_taken_as_is_forgotten_when_it_changes_or_dies():
    from hyper_parallel.api.module_boundary import _taken

    layer, twin = twins(lambda: nn.Linear(8, 6))
    parallelize_module(layer, mesh(), ColwiseParallel(output_layouts=R))
    start = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    x = start * 1
    first = layer(x)
    with torch.no_grad():
        x.add_(1)
    torch.testing.assert_close(layer(x), twin(x))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), twin(x))
    layer(x).sum().backward()
    assert x in _taken
    before = len(_taken)
    del x, first
    assert len(_taken) == before - 1


@pytest.mark.ranks(2)
def test_a_gradient_that_no_rank_needs_costs_nothing():
    model, _ = twins(Mlp)
    parallelize_module(model, mesh(), {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})
    model.requires_grad_(False)
    model.gate.weight.requires_grad_()
    forward, backward, _ = count(model, torch.randn(3, 8, dtype=torch.float64))
    assert forward == {"all_reduce": 1}
    assert backward == {}
