"""Gradients accumulated over several backwards, reduced each time, late, or in part."""

import pytest
from fsdp_nets import BLOCKS, batch, loss_of, mine, pair, same_gradients, wrap

from hyper_parallel import CommTrace, init_device_mesh
from hyper_parallel_fsdp import hsdp_sync_stream


@pytest.mark.ranks(4)
@pytest.mark.parametrize("manner", ["no_sync", "switch"])
def test_accumulation_without_reduction(manner):
    plain, net = pair()
    wrap(net)
    for step in range(3):
        ids, labels = batch(step)
        loss_of(plain, ids, labels).backward()
        with CommTrace() as trace:
            if manner == "no_sync" and step < 2:
                with net.no_sync():
                    loss_of(net, mine(ids), mine(labels)).backward()
            else:
                if manner == "switch":
                    net.set_requires_gradient_sync(step == 2)
                    net.set_reshard_after_backward(step == 2)
                loss_of(net, mine(ids), mine(labels)).backward()
        assert trace.counts["reduce_scatter"] == (BLOCKS + 1 if step == 2 else 0)
        if manner == "switch" and step:
            assert trace.phase("forward")["all_gather"] == 0  # kept from the backward before
    same_gradients(net, plain)


@pytest.mark.ranks(4)
def test_accumulation_with_reductions_and_late_all_reduce():
    plain, net = pair()
    wrap(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp")))
    for step in range(4):
        ids, labels = batch(step)
        loss_of(plain, ids, labels).backward()
        net.set_requires_all_reduce(step != 2)
        net.set_is_last_backward(step != 1)
        with CommTrace() as trace:
            loss_of(net, mine(ids), mine(labels)).backward()
        assert trace.counts["reduce_scatter"] == BLOCKS + 1
        if step == 1:
            hsdp_sync_stream()
        if step < 2:
            same_gradients(net, plain)
    same_gradients(net, plain)
