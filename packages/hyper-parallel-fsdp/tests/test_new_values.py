"""Whatever writes to the shards, and however they are kept whole, the next forward computes with the new values."""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import BLOCKS, Net, batch, loss_of, mine, pair, wrap

from hyper_parallel import CommTrace, DTensor
from hyper_parallel_fsdp import MixedPrecisionPolicy


def local_of(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


# Each gets a net and its parameters as they were before, which an optimizer holds; none raises a version counter.


def by_fused_optimizer(net, parameters):
    torch.optim.AdamW(parameters, lr=0.05, fused=True).step()


def by_foreign_optimizer(net, parameters):
    flags = {"lr": 0.1, "weight_decay": 0, "momentum": 0, "dampening": 0, "nesterov": False, "maximize": False}
    gradients = [local_of(p.grad) for p in parameters]
    torch._fused_sgd_([local_of(p) for p in parameters], gradients, [], is_first_step=False, **flags)


def by_collective(net, parameters):
    for parameter in parameters:
        local = local_of(parameter)
        local.numpy()[...] += 1
        dist.all_reduce(local, dist.ReduceOp.MAX, group=_alone())


def by_data(net, parameters):
    for parameter in parameters:
        parameter.data.mul_(0.5)


def by_numpy(net, parameters):
    for parameter in parameters:
        local_of(parameter).numpy()[...] *= 0.5


def by_dlpack(net, parameters):
    for parameter in parameters:
        torch.from_dlpack(local_of(parameter)).mul_(0.5)


def by_swap(net, parameters):  # the average of an EMA takes the place of the weights
    for parameter in parameters:
        parameter.data = parameter.detach().clone().mul_(0.5)


def by_assignment(net, parameters):
    halved = {name: copy.deepcopy(value).mul_(0.5) for name, value in net.state_dict().items()}
    net.load_state_dict(halved, assign=True)


WRITES = [
    by_fused_optimizer,
    by_foreign_optimizer,
    by_collective,
    by_data,
    by_numpy,
    by_dlpack,
    by_swap,
    by_assignment,
]
_groups = {}


def _alone():
    world = dist.group.WORLD
    if world not in _groups:
        _groups[world] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return _groups[world][dist.get_rank()]


def evaluate(net):
    with torch.no_grad():
        net(mine(batch(5)[0]))


def forward_without_backward(net):
    net(mine(batch(5)[0]))


def unshard(net):
    net.blocks[0].unshard()
    net.unshard(async_op=True).wait()


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
SETTINGS = {
    "default": ({}, True),
    "kept after backward": ({}, False),
    "kept after forward": ({"reshard_after_forward": False}, True),
    "kept after both": ({"reshard_after_forward": False}, False),
    "low precision, whole on all ranks": ({"mp_policy": LOW, "enable_param_shard": False}, False),
}


class Small(Net):
    def __init__(self):
        super().__init__()
        self.blocks = self.blocks[:1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_after_every_write(setting):
    plain, net = pair(Small)
    options, reshard = SETTINGS[setting]
    wrap(net, **options)
    net.set_reshard_after_backward(reshard)
    start = [copy.deepcopy(each.state_dict()) for each in (plain, net)]
    for between in (evaluate, forward_without_backward, unshard, lambda net: None):
        for write in WRITES:
            for each, part in ((plain, lambda whole: whole), (net, mine)):
                loss_of(each, *map(part, batch(0))).backward()
            held = list(net.parameters())
            between(net)
            write(net, held)
            write(plain, list(plain.parameters()))
            ids, _ = batch(7)
            low = options.get("mp_policy") is LOW
            want = copy.deepcopy(plain).bfloat16()(mine(ids)) if low else plain(mine(ids))
            error = (net(mine(ids)) - want).norm() / want.norm()
            assert error < (1e-2 if low else 1e-5), (between, write, error)
            for each, state in zip((plain, net), start, strict=True):
                each.load_state_dict(state)
                each.zero_grad()


@pytest.mark.ranks(2)
def test_what_is_gathered_again():
    """A form serves the root call that gathered it; another one only where no reduction came, nor was to come."""
    _, net = pair()
    wrap(net, reshard_after_forward=False)
    ids, labels = (mine(part) for part in batch(0))

    def gathers(run):
        with CommTrace() as trace:
            run()
        return trace.counts["all_gather"]

    def train():
        loss_of(net, ids, labels).backward()

    net.set_reshard_after_backward(False)
    assert gathers(train) == gathers(train) == BLOCKS + 1  # the second: an optimizer may have stepped
    with net.no_sync():
        assert gathers(train) == BLOCKS + 1
        assert gathers(lambda: evaluate(net)) == 0
        assert gathers(train) == 0
    assert gathers(train) == 0  # the last micro-batch, which reduces
    assert gathers(lambda: evaluate(net)) == BLOCKS + 1
    assert all(bucket.whole.untyped_storage().size() == 0 for block in net.blocks for bucket in block._hsdp.buckets)
    with net.no_sync():  # so for generating many tokens
        assert gathers(lambda: evaluate(net)) == BLOCKS + 1
        assert gathers(lambda: evaluate(net)) == 0
    net.unshard()
    assert gathers(train) == BLOCKS + 1
