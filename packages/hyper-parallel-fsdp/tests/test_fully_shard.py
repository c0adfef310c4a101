"""``fully_shard`` on plain batches: gradients of one device, and what is sent for them on which mesh."""

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import BLOCKS, batch, loss_of, mine, pair, train, wrap
from torch import nn

from hyper_parallel import CommTrace, DTensor, Replicate, Shard, init_device_mesh
from hyper_parallel_fsdp import fully_shard


@pytest.mark.ranks(4)
def test_one_axis():
    plain, net = pair()
    wrap(net)
    assert [p.placements for p in net.parameters()] == [(Shard(0),)] * len(list(plain.parameters()))
    first, *later = train(net, plain)
    assert first.phase("forward") == {"all_gather": BLOCKS + 1}
    assert first.events[0].change == "fully_shard: gather embed.weight and 1 more"
    assert first.events[-1].change == "fully_shard: reduce embed.weight and 1 more"
    # The root stays whole, and so does the last block once it is known that its backward comes first.
    assert first.phase("backward") == {"all_gather": BLOCKS, "reduce_scatter": BLOCKS + 1}
    for trace in later:
        assert trace.phase("forward") == {"all_gather": BLOCKS + 1}
        assert trace.phase("backward") == {"all_gather": BLOCKS - 1, "reduce_scatter": BLOCKS + 1}


@pytest.mark.ranks(4)
def test_two_axes():
    plain, net = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    wrap(net, mesh=mesh)
    assert net.embed.weight.placements == (Replicate(), Shard(0))
    trace = train(net, plain)[-1]
    assert trace.counts == {"all_gather": 2 * BLOCKS, "reduce_scatter": BLOCKS + 1, "all_reduce": BLOCKS + 1}
    assert {e.axes for e in trace.events if e.op == "all_reduce"} == {(0,)}
    assert {e.axes for e in trace.events if e.op != "all_reduce"} == {(1,)}


@pytest.mark.ranks(4)
def test_two_sharding_axes():
    plain, net = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "cp"))
    wrap(net, mesh=mesh)
    assert net.embed.weight.layout.alias_tensor_map == (("fsdp", "cp"), "None")
    trace = train(net, plain)[-1]
    assert trace.counts == {"all_gather": 2 * BLOCKS, "reduce_scatter": BLOCKS + 1}
    assert {e.axes for e in trace.events} == {(0, 1)}


@pytest.mark.ranks(4)
def test_without_sharding():
    plain, net = pair()
    wrap(net, enable_param_shard=False)
    trace = train(net, plain)[-1]
    assert trace.counts == {"all_reduce": BLOCKS + 1}


@pytest.mark.ranks(1)
def test_one_rank():
    plain, net = pair()
    wrap(net)
    assert not any(trace.events for trace in train(net, plain))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("keep", [True, False])
def test_reshard_after_forward_as_told(keep):
    plain, net = pair()
    wrap(net, reshard_after_forward=not keep)
    again = 0 if keep else BLOCKS + 1
    for trace in train(net, plain):
        assert trace.counts == {"all_gather": BLOCKS + 1 + again, "reduce_scatter": BLOCKS + 1}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["rows", "last dims", "two axes"])
def test_resharded_to_a_part_of_the_ranks(kind):
    """Each of two neighbours keeps a half after forward, from which the two gather for backward."""
    plain, net = pair()
    options = {}
    if kind == "last dims":
        options["shard_placement_fn"] = lambda p: Shard(-1)
    if kind == "two axes":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "cp"))
    wrap(net, reshard_after_forward=2, **options)
    with CommTrace() as trace:
        loss = loss_of(net, *map(mine, batch(0)))
    kept = [bucket.whole.untyped_storage().size() for block in net.blocks for bucket in block._hsdp.buckets]
    assert kept == [0] * BLOCKS
    for bucket in net.blocks[0]._hsdp.buckets:
        assert bucket._part.numel() == bucket.whole.numel() // 2
    with CommTrace() as backward:
        loss.backward()
    assert trace.counts["all_gather"] == backward.counts["all_gather"] == BLOCKS + 1
    assert {e.ranks for e in trace.events if e.op == "all_gather"} == {4}
    assert {e.ranks for e in backward.events if e.op == "all_gather"} == {2}
    net.zero_grad()
    for trace in train(net, plain):
        assert trace.counts["all_gather"] == 2 * (BLOCKS + 1)
        assert trace.counts["reduce_scatter"] == BLOCKS + 1


@pytest.mark.ranks(4)
def test_other_dims_and_whole_parameters():
    plain, net = pair()
    wrap(net, shard_placement_fn=lambda p: Shard(-1) if p.ndim > 1 else Replicate())
    assert net.blocks[0].up.weight.placements == (Shard(1),)
    assert net.blocks[0].up.bias.placements == (Replicate(),)
    trace = train(net, plain)[-1]
    # The head and the embedding are one bucket; each block has its weights in one and its biases and norm in another.
    assert trace.counts == {"all_gather": 2 * BLOCKS, "reduce_scatter": BLOCKS + 1, "all_reduce": BLOCKS}


@pytest.mark.ranks(4)
def test_modules_wrapped_together():
    plain, net = pair()
    fully_shard(net.blocks[0])
    fully_shard([net.blocks[1], net.blocks[2]])
    fully_shard(net)
    trace = train(net, plain)[-1]
    assert trace.phase("forward") == {"all_gather": 3}
    assert trace.counts["reduce_scatter"] == 3


@pytest.mark.ranks(4)
def test_unshard_reshard_and_prefetch():
    plain, net = pair()
    wrap(net)
    handle = net.blocks[0].unshard(async_op=True)
    handle.wait()
    torch.testing.assert_close(net.blocks[0].up.weight.detach(), plain.blocks[0].up.weight.detach())
    assert isinstance(net.blocks[0].state_dict()["up.weight"], DTensor)  # which reshards
    net.unshard()
    assert not isinstance(net.head.weight, DTensor)
    net.reshard()
    assert isinstance(net.head.weight, DTensor)
    first, second, third = net.blocks
    net.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([third])
    third.set_modules_to_backward_prefetch([second, first])
    for trace in train(net, plain):
        assert trace.counts["reduce_scatter"] == BLOCKS + 1
        assert trace.phase("forward") == {"all_gather": BLOCKS + 1}
    with pytest.raises(ValueError, match="got a LayerNorm"):
        net.set_modules_to_forward_prefetch([first.norm])


@pytest.mark.ranks(4)
def test_divide_factor():
    plain, net = pair()
    wrap(net)
    net.blocks[0].set_gradient_divide_factor(1.0)
    net.set_gradient_divide_factor(2.0)  # as PyTorch's: of its own parameters only
    loss_of(plain, *batch(0)).backward()
    loss_of(net, *map(mine, batch(0))).backward()
    for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
        times = 4 if name.startswith("blocks.0") else 1 if name.startswith("blocks") else 2
        torch.testing.assert_close(got.grad.full_tensor(), times * want.grad, rtol=0, atol=1e-5)


@pytest.mark.ranks(4)
def test_synchronize_parameters():
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(5, 3)
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp")))
    net.synchronize_parameters()
    whole = net.weight.detach().full_tensor()
    pieces = [torch.empty_like(whole) for _ in range(4)]
    dist.all_gather(pieces, whole)
    assert all(torch.equal(piece, whole) for piece in pieces)
