"""``fully_shard`` on plain batches: gradients of one device, collectives counted, in every way of running a module.

No op pack is needed here: optimizers on DTensors and tensor parallelism are tested in the repository's ``tests/``.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import CommTrace, DTensor, Replicate, Shard, init_device_mesh
from hyper_parallel_fsdp import fully_shard, hsdp_sync_stream, register_fsdp_forward_method

BLOCKS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 19), nn.Linear(19, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """11 rows of the embedding and 19 of the hidden layer are uneven over 2 and over 4 ranks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pair(kind=Net):
    torch.manual_seed(0)
    plain = kind()
    return plain, copy.deepcopy(plain)


def wrap(net, **options):
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def batch(step, size=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (size, 5), generator=generator), torch.randint(0, 11, (size, 5), generator=generator)


def mine(whole):
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(net, ids, labels):
    return F.cross_entropy(net(ids).flatten(0, 1), labels.flatten())


def same_gradients(net, plain):
    for (name, got), want in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            assert got.grad.layout is got.layout, name
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def descend(net):
    """A step of gradient descent; on the local pieces, where there are some."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            local = [t._local if isinstance(t, DTensor) else t for t in (parameter, parameter.grad)]
            local[0].sub_(0.1 * local[1])
        parameter.grad = None


def train(net, plain, steps=3):
    """Both nets side by side; the trace of each of our steps."""
    traces = []
    for step in range(steps):
        ids, labels = batch(step)
        want = loss_of(plain, ids, labels)
        want.backward()
        with CommTrace() as trace:
            loss = loss_of(net, mine(ids), mine(labels))
            loss.backward()
        traces.append(trace)
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / dist.get_world_size(), want.detach(), rtol=1e-5, atol=1e-6)
        same_gradients(net, plain)
        descend(net)
        descend(plain)
    return traces


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
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_activation_checkpointing(place, reentrant):
    plain, net = pair()
    if place == "outside":
        wrap(net)

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    net.blocks = nn.ModuleList(Checkpointed(b) for b in net.blocks)
    if place == "inside":
        wrap(net)
    trace = train(net, plain)[-1]
    # Computing a forward again gathers nothing again. (A reentrant one outside does not know that it is the last.)
    again = BLOCKS - 1 if (place, reentrant) != ("outside", True) else BLOCKS
    assert trace.counts == {"all_gather": BLOCKS + 1 + again, "reduce_scatter": BLOCKS + 1}


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


@pytest.mark.ranks(4)
def test_several_forwards_before_one_backward_reduce_once():
    plain, net = pair()
    wrap(net)
    for _ in range(2):
        (loss_of(plain, *batch(0)) + loss_of(plain, *batch(1))).backward()
        with CommTrace() as trace:
            losses = [loss_of(net, *map(mine, batch(step))) for step in range(2)]
            sum(losses).backward()
        assert trace.counts["reduce_scatter"] == BLOCKS + 1
        same_gradients(net, plain)
    # And each with a backward of its own, in the other order.
    losses = [loss_of(plain, *batch(step)) for step in range(2)]
    ours = [loss_of(net, *map(mine, batch(step))) for step in range(2)]
    for step in (1, 0):
        losses[step].backward()
        ours[step].backward()
    same_gradients(net, plain)


@pytest.mark.ranks(4)
def test_two_backwards_through_one_graph_and_gradients_of_inputs():
    plain, net = pair()
    wrap(net)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, generator=generator, requires_grad=True)
    part = mine(x.detach()).clone().requires_grad_()
    want, got = plain.blocks[0](x).square().mean(), net.blocks[0](part).square().mean()
    for _ in range(2):
        want.backward(retain_graph=True)
        got.backward(retain_graph=True)
    same_gradients(net.blocks[0], plain.blocks[0])
    torch.testing.assert_close(part.grad / 4, mine(x.grad))
    (again,) = torch.autograd.grad(net.blocks[0](part).square().mean(), part)
    torch.testing.assert_close(2 * again, part.grad)


class Branches(nn.Module):
    """A frozen part, a tied weight, a number, a part that not every step uses, one that not every rank uses."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(11, 6), Block(), Block()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.never = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))
        self.experts = nn.ParameterList(nn.Parameter(torch.full((5, 6), 0.1 * i + 1)) for i in range(4))
        for parameter in self.first.up.parameters():
            parameter.requires_grad_(False)

    def forward(self, ids, second, expert):
        x = self.first(self.embed(ids))
        if second:
            x = self.second(x)
        return self.head(x * self.experts[expert]) * self.scale


@pytest.mark.ranks(4)
def test_frozen_tied_scalar_and_unused_parameters():
    plain, net = pair(Branches)
    for module in (net.embed, net.first, net.second, net):
        fully_shard(module)
    assert net.head.weight is net.embed.weight
    assert set(net.hsdp_params) == {"scale", "never", *(f"experts.{i}" for i in range(4)), "embed.weight"}
    for step in range(3):
        ids, _ = batch(step)
        # Each rank's part of the batch goes through the expert of its number; the last expert is never used.
        experts = [rank % 3 for rank in range(4)]
        parts = [plain(part, step, experts[r]).square().mean() for r, part in enumerate(ids.chunk(4))]
        (sum(parts) / 4).backward()
        net(mine(ids), step, experts[dist.get_rank()]).square().mean().backward()
        assert net.never.grad is None
        assert net.experts[3].grad is None
        assert net.first.up.weight.grad is None
        same_gradients(net, plain)
        descend(net)
        descend(plain)


@pytest.mark.ranks(4)
def test_frozen_after_wrapping_and_thawed():
    plain, net = pair()
    wrap(net)
    for frozen in (True, False):
        for each in (plain, net):
            each.blocks[1].requires_grad_(not frozen)
        train(net, plain, steps=2)
        assert (net.blocks[1].up.weight.grad is None) == (plain.blocks[1].up.weight.grad is None)


@pytest.mark.ranks(4)
def test_usable_after_exceptions():
    plain, net = pair()
    wrap(net)
    train(net, plain, steps=2)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    def in_forward(mod, args):
        raise ZeroDivisionError

    def in_backward(mod, args):
        return (Fails.apply(*args),)

    parameters = list(net.parameters())
    for failing in (in_forward, in_backward, in_backward):
        handle = net.blocks[1].register_forward_pre_hook(failing)
        with pytest.raises(ZeroDivisionError):
            loss_of(net, *map(mine, batch(7))).backward()
        handle.remove()
        if failing is in_forward:
            assert all(isinstance(p, DTensor) for p in net.parameters())
        for parameter in parameters:
            parameter.grad = None
        train(net, plain, steps=2)  # the next forward cleans up


@pytest.mark.ranks(4)
def test_evaluation_between_steps_sees_the_new_parameters():
    plain, net = pair()
    wrap(net)
    ids, _ = batch(0)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(net.eval()(mine(ids)), plain(mine(ids)))
        assert all(isinstance(p, DTensor) for p in net.parameters())
        train(net.train(), plain, steps=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter._local.zero_()
        assert not net(ids).any()


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
def test_another_forward_method():
    plain, net = pair()
    wrap(net)
    for each in (plain, net):
        each.score = lambda ids, each=each: each.head(each.embed(ids)).square().mean()
        register_fsdp_forward_method(each, "score")
    ids, _ = batch(0)
    plain.score(ids).backward()
    net.score(mine(ids)).backward()
    same_gradients(net, plain)


@pytest.mark.ranks(4)
def test_wrapped_modules_called_without_the_root():
    plain, net = pair()
    wrap(net)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        plain.blocks[0](x).square().mean().backward()
        net.blocks[0](mine(x)).square().mean().backward()
        same_gradients(net.blocks[0], plain.blocks[0])
        for each in (net, plain):
            each.zero_grad()
        train(net, plain, steps=1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision(reduce_dtype):
    from hyper_parallel_fsdp import MixedPrecisionPolicy

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
    from hyper_parallel_fsdp import MixedPrecisionPolicy

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


@pytest.mark.ranks(2)
def test_offload_policy():
    from hyper_parallel_fsdp import CPUOffloadPolicy

    plain, net = pair()
    wrap(net, offload_policy=CPUOffloadPolicy())
    train(net, plain)


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


@pytest.mark.ranks(4)
def test_divide_factor():
    plain, net = pair()
    wrap(net)
    net.set_gradient_divide_factor(1.0)
    (4 * loss_of(plain, *batch(0))).backward()
    loss_of(net, *map(mine, batch(0))).backward()
    same_gradients(net, plain)


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


@pytest.mark.ranks(2)
def test_hook_of_a_parameter_sees_its_gradient():
    net = nn.Linear(4, 4)
    fully_shard(net)
    seen = []
    net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.layout))
    net(torch.ones(2, 4)).sum().backward()
    assert seen == [net.weight.layout]
