"""``hyper_parallel.checkpoint``: state dicts of modules and optimizers."""

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from checkpoint_models import LAYOUTS, build, optimizer_of, same_tensors, train, whole_state
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import CommTrace, DTensor, PackedShard, Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.checkpoint import (
    StateDictOptions,
    full_tensors,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from hyper_parallel.tensor.distribute import gather_to_first
from hyper_parallel.testing.placing import make, mesh_of

FULL = StateDictOptions(full_state_dict=True)
TO_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
SHARDED = [plan for plan in LAYOUTS if plan != "one rank"]


def trained(plan, kind="adamw", steps=2, seed=0):
    net = build(seed, plan, 4)
    optimizer = optimizer_of(net, kind)
    train(net, optimizer, range(steps))
    return net, optimizer


# -- getting ----------------------------------------------------------------------------------------------------------


def test_without_sharding_they_are_those_of_pytorch():
    net, optimizer = trained("one rank")
    torch_model, torch_optimizer = torchs.get_state_dict(net, optimizer)
    model, optimizers = get_state_dict(net, optimizer)
    assert list(model) == list(torch_model)
    del optimizers["state"]["unused"]
    assert optimizers["param_groups"] == torch_optimizer["param_groups"]
    same_tensors(whole_state(optimizers), whole_state(torch_optimizer))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    mine = get_optimizer_state_dict(net, optimizer, options=flat)
    del mine["state.unused"]
    assert mine.keys() == torchs.get_optimizer_state_dict(net, optimizer, options=flat).keys()


@pytest.mark.ranks(4)
def test_by_default_the_models_own_tensors():
    net, optimizer = trained("fsdp x tp")
    model, optimizers = get_state_dict(net, optimizer)
    for name, parameter in net.named_parameters():
        assert model[name].layout is parameter.layout
        assert model[name].to_local().data_ptr() == parameter.to_local().data_ptr()
        if parameter.requires_grad and name != "unused":
            assert optimizers["state"][name]["exp_avg"].layout is parameter.layout
    assert "scratch" not in model
    assert optimizers["param_groups"][0]["params"] == ["embed.weight", "gate_up.weight", "down.weight"]
    assert "frozen" not in get_model_state_dict(net, options=StateDictOptions(ignore_frozen_params=True))


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("plan", SHARDED)
def test_whole_tensors_on_every_rank_or_on_rank_0(plan):
    net, optimizer = trained(plan)
    model, optimizers = get_state_dict(net, optimizer)
    del optimizers["state"]["unused"]  # has none yet
    want = whole_state([model, optimizers][0]), whole_state(optimizers)
    for options in (FULL, TO_RANK_0):
        full = get_state_dict(net, optimizer, options=options)
        if options is TO_RANK_0 and dist.get_rank():
            assert full == ({}, {})
            continue
        for got, wanted in zip(full, want, strict=True):
            same_tensors(whole_state(got), wanted)
        assert not any(isinstance(value, DTensor) for value in full[0].values())


@pytest.mark.ranks(4)
def test_gathering_to_rank_0_sends_each_shard_towards_it_once():
    x = make(torch.arange(24.0).reshape(8, 3), mesh_of((4,)), [Shard(0)])
    with CommTrace() as trace:
        whole = gather_to_first(x)
    assert [event.op for event in trace.events] == ["gather"]
    assert trace.nbytes == 24
    assert (whole is not None) == (dist.get_rank() == 0)
    copies = make(torch.arange(24.0).reshape(8, 3), mesh_of((2, 2)), [Replicate(), Shard(0)])
    with CommTrace() as trace:
        gather_to_first(copies)
    assert len(trace.events) == (1 if dist.get_rank() < 2 else 0)


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors that were made inside and are alive: the most there were at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if any(word in func.name() for word in ("empty", "zeros", "clone", "full")):
                self.count(tensor)
        return result

    def count(self, tensor):
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage in self.known:
            return
        self.known[storage] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.freed, size)

    def freed(self, size):
        self.now -= size


class Tower(nn.Module):
    def __init__(self, layers=24, size=64):
        super().__init__()
        placements = [Shard(0)]
        for i in range(layers):
            value = make(torch.full((size, size), float(i)), mesh_of((4,)), placements)
            self.register_parameter(f"w{i}", nn.Parameter(value))


@pytest.mark.ranks(4)
def test_a_full_state_dict_is_streamed_one_parameter_at_a_time():
    net = Tower()
    one = 64 * 64 * 4
    with LiveBytes() as memory:
        for i, (name, value) in enumerate(full_tensors(net.state_dict())):
            assert name == f"w{i}"
            assert value is None if dist.get_rank() else bool((value == i).all())
            value = None
    # On rank 0 the last parameter until the next has come, the next, its pieces; elsewhere nothing but shards. Gloo's
    # threads let go of what was sent a little later, hence the room below the 24 parameters that there are.
    most = 8 * one if dist.get_rank() == 0 else 4 * one
    assert memory.peak <= most
    assert memory.peak >= one or dist.get_rank()
    with LiveBytes() as memory:
        state = get_model_state_dict(net, options=TO_RANK_0)
    assert memory.peak <= len(state) * one + most
    with LiveBytes() as memory:
        set_model_state_dict(net, state, options=FROM_RANK_0)
    assert memory.peak <= most


@pytest.mark.ranks(4)
def test_whole_tensors_are_copies_and_tied_ones_are_gathered_once():
    net, optimizer = trained("replicas")
    with CommTrace() as trace:
        model, optimizers = get_state_dict(net, optimizer, options=FULL)
    assert model["head.weight"] is model["embed.weight"]
    before = whole_state(model) | whole_state(optimizers)
    train(net, optimizer, range(1))
    same_tensors(whole_state(model) | whole_state(optimizers), before)
    # Each parameter once, and the two moments of those that are trained.
    assert len(trace.events) == sum(3 if p in optimizer.state else 1 for p in net.parameters())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathering_reverses_any_layout(dtype):
    flat, grid = mesh_of((4,)), mesh_of((2, 2))
    cases = [
        ((7, 3), flat, [Shard(0)], None),
        ((2, 3), flat, [Shard(0)], None),
        ((7, 3), flat, [PackedShard(0, (5, 2))], None),
        ((7, 3), grid, [Shard(0), Shard(1)], None),
        ((7, 3), grid, [Shard(0), Shard(0)], None),
        ((7, 3), grid, [Shard(0), Shard(0)], {0: (1, 0)}),
        ((7, 3), grid, [Shard(0), PackedShard(0, (5, 2))], None),
        ((7, 3), grid, [Replicate(), Shard(1)], None),
        ((0, 3), grid, [Shard(0), Shard(1)], None),
        ((), grid, [Replicate(), Replicate()], None),
    ]
    for shape, mesh, placements, order in cases:
        value = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype)
        whole = gather_to_first(make(value, mesh, placements, shard_order=order))
        assert whole is None if dist.get_rank() else torch.equal(whole, value)
    with pytest.raises(ValueError, match="a pending reduction"):
        gather_to_first(make(torch.ones(3), flat, [Partial()]))


# -- setting ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("source", "target"), [("fsdp", "fsdp x tp"), ("fsdp x tp", "tp"), ("tp", "replicas")])
@pytest.mark.parametrize("options", [FULL, FROM_RANK_0], ids=["full", "from rank 0"])
def test_a_full_state_dict_goes_into_any_layout(source, target, kind, options):
    net, optimizer = trained(source, kind)
    state = get_state_dict(net, optimizer, options=FULL if options == FULL else TO_RANK_0)
    other = build(1, target, 4)
    its_optimizer = optimizer_of(other, kind)
    layouts = {name: p.layout for name, p in other.named_parameters()}
    set_state_dict(other, its_optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    assert {name: p.layout for name, p in other.named_parameters()} == layouts
    assert other.head.weight is other.embed.weight
    same_tensors(whole_state(other.state_dict()), whole_state(net.state_dict()))
    assert train(other, its_optimizer, range(2, 4)) == pytest.approx(train(net, optimizer, range(2, 4)), abs=1e-5)


@pytest.mark.ranks(4)
def test_shards_in_another_layout_of_the_mesh_are_redistributed():
    net, optimizer = trained("fsdp")
    other = build(1, "fsdp on dim 1", 4)
    its_optimizer = optimizer_of(other)
    model, optimizers = get_state_dict(net, optimizer)
    set_state_dict(other, its_optimizer, model_state_dict=model, optim_state_dict=copy.deepcopy(optimizers))
    same_tensors(whole_state(other.state_dict()), whole_state(net.state_dict()))
    assert train(other, its_optimizer, [2]) == pytest.approx(train(net, optimizer, [2]), abs=1e-5)


@pytest.mark.ranks(4)
def test_getting_the_state_of_a_new_optimizer_leaves_it_as_it_is():
    net = build(0, "fsdp x tp", 4)
    optimizer = optimizer_of(net)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    before = whole_state(net.state_dict())
    state = get_optimizer_state_dict(net, optimizer)
    assert state["state"]["down.weight"]["exp_avg"].layout is net.down.weight.layout
    assert "frozen" not in state["state"]
    assert not optimizer.state
    assert scheduler._step_count == 1
    assert all(p.grad is None for p in net.parameters())
    same_tensors(whole_state(net.state_dict()), before)
    assert get_optimizer_state_dict(net, optimizer, options=FULL)["state"] == {}


@pytest.mark.ranks(4)
def test_flat_optimizer_states_and_several_optimizers():
    net = build(0, "fsdp", 4)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    halves = [list(net.parameters())[:3], list(net.parameters())[3:]]
    optimizers = [torch.optim.AdamW(half, lr=0.1 * (i + 1)) for i, half in enumerate(halves)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    net.embed.weight.grad = torch.ones_like(net.embed.weight)
    optimizers[1].step()
    state = get_optimizer_state_dict(net, optimizers, options=flat)
    assert (state["param_groups.low.lr"], state["param_groups.embed.weight.lr"]) == (0.1, 0.2)
    assert isinstance(state["state.embed.weight.exp_avg"], DTensor)
    other = build(0, "fsdp", 4)
    halves = [list(other.parameters())[:3][::-1], list(other.parameters())[3:]]
    loaded = [torch.optim.AdamW(half) for half in halves]
    set_optimizer_state_dict(other, loaded, state, options=flat)
    assert [optimizer.param_groups[0]["lr"] for optimizer in loaded] == [0.1, 0.2]
    assert torch.equal(
        loaded[1].state[other.embed.weight]["exp_avg"].full_tensor(),
        optimizers[1].state[net.embed.weight]["exp_avg"].full_tensor(),
    )
    with pytest.raises(ValueError, match=r"were saved with different lr: 0.1 and 0.2; group the parameters"):
        set_optimizer_state_dict(other, torch.optim.AdamW(other.parameters()), state, options=flat)


def test_nested_state_and_names_with_dots_survive_flattening():
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        optimizer.state[parameter] = {"outer": {"inner": torch.ones(2)}, "count": 3}
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(net, optimizer, options=flat)
    optimizer.state.clear()
    set_optimizer_state_dict(net, optimizer, state, options=flat)
    assert torch.equal(optimizer.state[net[0].bias]["outer"]["inner"], torch.ones(2))
    assert optimizer.state[net[0].bias]["count"] == 3


class Scalar(nn.Module):
    """A 0-dim parameter, and state of its own."""

    def __init__(self, value):
        super().__init__()
        self.gain = nn.Parameter(make(torch.tensor(value), mesh_of((4,)), [Replicate()]))
        self.extra = {}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [StateDictOptions(), FULL, FROM_RANK_0], ids=["sharded", "full", "from rank 0"])
def test_scalars_step_counts_and_extra_state(options):
    net = Scalar(2.0)
    net.extra = {"seen": [torch.arange(3), 7]}
    optimizer = torch.optim.NAdam(net.parameters(), lr=0.1)
    net.gain.square().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = get_state_dict(net, optimizer, options=FULL if options.full_state_dict else StateDictOptions())
    if options == FROM_RANK_0 and dist.get_rank():
        state = {}, {}
    other = Scalar(5.0)
    its_optimizer = torch.optim.NAdam(other.parameters(), lr=0.1)
    set_state_dict(other, its_optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    for model, its in ((net, optimizer), (other, its_optimizer)):
        assert {key: type(value) for key, value in its.state[model.gain].items()} == {
            "step": torch.Tensor,
            "mu_product": torch.Tensor,
            "exp_avg": DTensor,
            "exp_avg_sq": DTensor,
        }
        model.gain.square().backward()
        its.step()
    assert other.gain.item() == net.gain.item()
    assert torch.equal(other.extra["seen"][0], torch.arange(3))
    assert other.extra["seen"][1] == 7


@pytest.mark.ranks(4)
def test_a_model_on_the_meta_device_gets_tensors_of_its_layouts():
    net = build(0, "fsdp x tp", 4)
    state = get_model_state_dict(net, options=TO_RANK_0)
    empty = copy.deepcopy(net).to("meta")
    set_model_state_dict(empty, state, options=FROM_RANK_0)
    for name, parameter in empty.named_parameters():
        assert parameter.layout is net.get_parameter(name).layout
        assert parameter.requires_grad == net.get_parameter(name).requires_grad
    same_tensors(whole_state(empty.state_dict()), whole_state(net.state_dict()))


# -- errors: the same on every rank -----------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [StateDictOptions(), FULL, FROM_RANK_0], ids=["sharded", "full", "from rank 0"])
def test_what_does_not_fit_a_model_is_named(options):
    net, _ = trained("fsdp")
    state = get_model_state_dict(net, options=FULL if options.full_state_dict else StateDictOptions())
    state["new"] = state.pop("frozen")
    state["down.bias"] = torch.zeros(9)
    if options == FROM_RANK_0 and dist.get_rank():
        state = {}
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"frozen".*Unexpected key.*"new".*size mismatch for down.bias'
    ):
        set_model_state_dict(net, state, options=options)


@pytest.mark.ranks(4)
def test_what_is_allowed_without_strict():
    net, optimizer = trained("fsdp")
    model, optimizers = get_state_dict(net, optimizer, options=FULL)
    del model["frozen"], optimizers["state"]["down.bias"]
    optimizers["param_groups"][1]["params"].remove("down.bias")
    loose = StateDictOptions(full_state_dict=True, strict=False)
    before = optimizer.state[net.down.bias]["exp_avg"].full_tensor()
    result = set_model_state_dict(net, model, options=loose)
    assert (result.missing_keys, result.unexpected_keys) == (["frozen"], [])
    set_optimizer_state_dict(net, optimizer, optimizers, options=loose)
    assert torch.equal(optimizer.state[net.down.bias]["exp_avg"].full_tensor(), before)
    assert not set_model_state_dict(
        net, model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    ).missing_keys


@pytest.mark.ranks(4)
def test_what_does_not_fit_an_optimizer_is_named():
    net, optimizer = trained("fsdp")
    state = get_optimizer_state_dict(net, optimizer)
    state["param_groups"][1]["params"].remove("down.bias")
    state["param_groups"][1]["params"].append("old.bias")
    with pytest.raises(RuntimeError, match=r"(?s)missing parameters: down.bias\n.*not have: old.bias\nPass options="):
        set_optimizer_state_dict(net, optimizer, state)
    with pytest.raises(ValueError, match="that the model has not; pass the whole model"):
        get_optimizer_state_dict(net.down, optimizer)


@pytest.mark.ranks(4)
def test_wrong_kinds_of_tensors_are_refused_with_the_option_that_is_meant():
    net, _ = trained("fsdp")
    full = get_model_state_dict(net, options=FULL)
    with pytest.raises(TypeError, match=r"frozen: .* whole tensor .*StateDictOptions\(full_state_dict=True\)"):
        set_model_state_dict(net, full)
    with pytest.raises(ValueError, match="broadcast_from_rank0=True needs full_state_dict=True"):
        set_model_state_dict(net, full, options=StateDictOptions(broadcast_from_rank0=True))
    other = build(0, "fsdp x tp", 4)
    with pytest.raises(ValueError, match=r"frozen: .* on mesh dp=2xtp=2, the model on tp=4; save it"):
        set_model_state_dict(net, get_model_state_dict(other))


@pytest.mark.ranks(4)
def test_what_rank_0_cannot_send_or_receive_is_refused_on_every_rank():
    net, _ = trained("fsdp")
    with pytest.raises(TypeError, match="broadcast_from_rank0 takes whole tensors on rank 0"):
        set_model_state_dict(net, get_model_state_dict(net), options=FROM_RANK_0)
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = nn.Module()
    stage.w = nn.Parameter(make(torch.ones(4), halves["tp"], [Shard(0)]))
    if dist.get_rank() < 2:
        state = get_model_state_dict(stage, options=TO_RANK_0)
        assert state == {} if dist.get_rank() else bool((state["w"] == 1).all())
    else:
        with pytest.raises(ValueError, match="its mesh tp=2 begins with rank 2; use the sharded state dict"):
            get_model_state_dict(stage, options=TO_RANK_0)
