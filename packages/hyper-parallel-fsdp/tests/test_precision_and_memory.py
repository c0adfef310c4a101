"""Other dtypes for computing and reducing, shards in host memory."""

import copy

import pytest
import torch
from fsdp_nets import batch, loss_of, mine, pair, same_gradients, train, wrap

from hyper_parallel import CommTrace, DTensor, init_device_mesh
from hyper_parallel_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, hsdp_sync_stream
from hyper_parallel_fsdp.root import Root


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision(reduce_dtype):
    plain, net = pair()
    low = copy.deepcopy(plain).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, output_dtype=torch.float32))
    assert all(p.dtype is torch.float32 for p in net.parameters())
    ids, _ = batch(0)
    with CommTrace() as trace:
        out = net(mine(ids))
        assert out.dtype is torch.float32
        torch.testing.assert_close(out, low(mine(ids)).float())
        out.square().mean().backward()
    size = 2 if reduce_dtype is None else 4
    gathers = [e.nbytes for e in trace.events if e.op == "all_gather"]
    flags = [4 * size * len(list(block.parameters())) for block in net.blocks]  # of whether each had a gradient
    scatters = [e.nbytes for e in trace.events if e.op == "reduce_scatter"]
    assert [s - f for s, f in zip(scatters, flags, strict=False)] == [g * size // 2 for g in gathers[1:4]]
    low(ids).float().square().mean().backward()
    for got, want in zip(net.parameters(), low.parameters(), strict=True):
        assert got.grad.dtype is torch.float32
        torch.testing.assert_close(got.grad.full_tensor(), want.grad.float(), rtol=0.1, atol=0.02)


@pytest.mark.ranks(2)
def test_mixed_dtypes_and_half_precision_reduction():
    plain, net = pair()
    for each in (plain, net):
        each.blocks[0].down.to(torch.float64)
        each.blocks[0].down.register_forward_pre_hook(lambda mod, args: (args[0].double(),))
        each.blocks[0].down.register_forward_hook(lambda mod, args, out: out.float())
    wrap(net, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    plain_loss = loss_of(plain, *batch(0))
    plain_loss.backward()
    loss_of(net, *map(mine, batch(0))).backward()
    for got, want in zip(net.parameters(), plain.parameters(), strict=True):
        assert got.grad.dtype is want.dtype
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("offload_policy", [OffloadPolicy(), CPUOffloadPolicy()])
@pytest.mark.parametrize("streams", [False, True])
def test_offload_policy_and_side_streams(offload_policy, streams, monkeypatch):
    make_root = Root.__init__

    def make_with_stream(root, states):  # one of the CPU, which does nothing, on the way that an accelerator goes
        make_root(root, states)
        root.stream = torch.cpu.Stream()

    if streams:
        monkeypatch.setattr(Root, "__init__", make_with_stream)
    plain, net = pair()
    wrap(net, mesh=init_device_mesh("cpu", (2, 2)), offload_policy=offload_policy)
    train(net, plain)
    net.set_is_last_backward(False)
    for each, part in ((plain, lambda whole: whole), (net, mine)):
        for step in range(2):
            loss_of(each, *map(part, batch(step))).backward()
    hsdp_sync_stream()
    same_gradients(net, plain)


@pytest.mark.ranks(4)
def test_converted_after_wrapping():
    plain, net = pair()
    wrap(net)
    train(net, plain, steps=1)
    loss_of(net, *map(mine, batch(9))).backward()
    net.zero_grad()
    plain.double()
    for parameter in net.parameters():  # what net.double() does, for which an op pack is needed
        parameter.data = DTensor.from_local(parameter._local.detach().double(), parameter.layout, shape=parameter.shape)
    train(net, plain, steps=2)
