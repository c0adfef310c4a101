"""``DTensor.redistribute`` with each of its arguments, alone and in flight."""

import copy
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import CommTrace, DTensor, Layout, Partial, Replicate, Shard
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make


def whole(*shape, dtype=torch.float64):
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape) + 1


@pytest.mark.ranks(4)
def test_the_target_is_given_in_any_of_five_forms():
    mesh, value = mesh_of((2, 2)), whole(5, 3)
    x = make(value, mesh, [Shard(0), Replicate()])
    target = Layout.from_placements(mesh, [Shard(1), Shard(0)], ndim=2)
    results = [
        x.redistribute(mesh, [Shard(1), Shard(0)]),
        x.redistribute(placements=[Shard(-1), Shard(-2)]),
        x.redistribute(target),
        x.redistribute(mesh, target),
        x.redistribute(Layout((2, 2), ("dp", "tp"))("tp", "dp")),
    ]
    for y in results:
        assert y.layout is target
        assert torch.equal(y.full_tensor(), value)
    assert x.placements == (Shard(0), Replicate())


@pytest.mark.ranks(4)
def test_the_same_layout_gives_the_same_tensor_and_sends_nothing():
    x = make(whole(5, 3), mesh_of((4,)), [Shard(0)], requires_grad=True)
    with CommTrace() as trace:
        assert x.redistribute(placements=[Shard(0)]) is x
        assert x.redistribute(placements=[Shard(0)], async_op=True) is x
    assert not trace.events


@pytest.mark.ranks(4)
def test_another_mesh_and_wrong_placements_are_refused():
    x = make(whole(5, 3), mesh_of((4,)), [Shard(0)])
    with pytest.raises(ValueError, match=r"one mesh: the tensor is on tp=4, got .*dp"):
        x.redistribute(mesh_of((2, 2)), [Shard(0), Replicate()])
    with pytest.raises(ValueError, match=r"one mesh: the tensor is on tp=4, got dp=2xtp=2"):
        x.redistribute(Layout.from_placements(mesh_of((2, 2)), [Shard(0), Replicate()], ndim=2))
    with pytest.raises(ValueError, match="give one per axis"):
        x.redistribute(placements=[Shard(0), Shard(1)])
    with pytest.raises(ValueError, match="placements are missing"):
        x.redistribute()
    with pytest.raises(ValueError, match="1 dimensions, this one has 2"):
        x.redistribute(Layout.from_placements(mesh_of((4,)), [Shard(0)], ndim=1))
    with pytest.raises(ValueError, match="grad_placements"):
        x.redistribute(placements=[Replicate()], grad_placements=[Replicate(), Replicate()])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(5, 3), (1, 2), (0, 3)])
def test_gradients_pass_every_transition(shape):
    mesh = mesh_of((2, 2))
    value, weight = whole(*shape), torch.sin(whole(*shape))
    forms = [
        [Replicate(), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Partial(), Shard(1)],
        [Replicate(), Partial()],
    ]
    for source in forms:
        for target in forms:
            x = make(value, mesh, source, requires_grad=True)
            y = x.redistribute(placements=target)
            torch.testing.assert_close(y.detach().full_tensor(), value)
            (y * make(weight, mesh, [Replicate(), Replicate()])).sum().backward()
            assert x.grad.placements == x.grad_placements
            torch.testing.assert_close(x.grad.full_tensor(), weight)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("target", [Replicate(), Shard(1), Partial()], ids=str)
def test_what_a_transposed_tensor_became_is_written_to(target):
    value = whole(4, 5).t().contiguous().t()
    x = make(value, mesh_of((4,)), [Shard(0)], requires_grad=True)
    moved = x.redistribute(placements=[target])
    moved.mul_(3)
    moved.square().sum().backward()
    assert moved.stride() == value.stride()
    assert torch.equal(moved.detach().full_tensor(), 3 * value)
    assert torch.equal(x.grad.full_tensor(), 18 * value)


@pytest.mark.ranks(4)
def test_a_gathered_tensor_for_different_work_scatters_its_gradient():
    x = make(whole(8, 3), mesh_of((4,)), [Shard(0)], requires_grad=True)
    with CommTrace() as trace:
        y = x.redistribute(placements=[Replicate()], grad_placements=[Partial()])
        rank_work = y.to_local() * (dist.get_rank() + 1)
        rank_work.sum().backward()
    assert y.grad_placements == (Partial(),)
    assert trace.phase("backward") == {"reduce_scatter": 1}
    assert torch.equal(x.grad.full_tensor(), torch.full((8, 3), 10.0, dtype=torch.float64))


# -- dtype on the wire --------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("async_op", [False, True])
def test_wire_dtypes_are_on_the_wire_forward_and_backward(async_op):
    value = torch.rand(5, 3) + 1
    x = make(value, mesh_of((4,)), [Shard(0)], requires_grad=True)
    weight = torch.rand(5, 3) + 1
    with CommTrace() as trace:
        y = x.redistribute(
            placements=[Replicate()],
            async_op=async_op,
            wire_dtype=torch.bfloat16,
            backward_dtype=torch.float64,
            grad_placements=[Partial()],
        )
        (y.to_local() * weight).sum().backward()
    assert y.dtype == torch.float32
    assert torch.equal(y.to_local(), value.bfloat16().float())
    padded = 4 * 2 * 3
    assert [(e.op, e.phase, e.nbytes) for e in trace.events] == [
        ("all_gather", "forward", 2 * padded),
        ("reduce_scatter", "backward", 8 * padded),
    ]
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad.full_tensor(), 4 * weight)


@pytest.mark.ranks(4)
def test_backward_dtype_alone_leaves_the_forward_exact():
    value = torch.rand(8, 3)
    x = make(value, mesh_of((4,)), [Partial()], requires_grad=True)
    y = x.redistribute(placements=[Shard(0)], backward_dtype=torch.bfloat16)
    weight = make(torch.rand(8, 3), mesh_of((4,)), [Shard(0)])
    (y * weight).sum().backward()
    assert torch.equal(x.grad.full_tensor(), weight.full_tensor().bfloat16().float())


# -- in flight ----------------------------------------------------------------------------------------------------

FIRST_USES = {
    "operator": lambda y: (y + 1).full_tensor() - 1,
    "keyword": lambda y: torch.add(input=y, other=0).full_tensor(),
    "list": lambda y: torch.cat([y, y])[:5].full_tensor(),
    "view": lambda y: y.t().t().full_tensor(),
    "in place": lambda y: y.mul_(2).full_tensor() / 2,
    "to_local": lambda y: y.to_local(),
    "to_local with grad_placements": lambda y: y.to_local(grad_placements=[Partial()]),
    "full_tensor": lambda y: y.full_tensor(),
    "redistribute": lambda y: y.redistribute(placements=[Shard(1)]).full_tensor(),
    "again in flight": lambda y: y.redistribute(placements=[Shard(1)], async_op=True).full_tensor(),
    "detach": lambda y: y.detach().full_tensor(),
    "data": lambda y: y.data.full_tensor(),
    "clone": lambda y: y.clone().full_tensor(),
    "deepcopy": lambda y: copy.deepcopy(y.detach()).full_tensor(),
    "pickle": lambda y: pickle.loads(pickle.dumps(y)).full_tensor(),
    "tolist": lambda y: torch.tensor(y.tolist(), dtype=torch.float64),
    "autograd.Function": lambda y: Double.apply(y).full_tensor() / 2,
}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("use", FIRST_USES)
def test_every_first_use_of_a_tensor_in_flight_waits(use):
    value = whole(5, 3)
    for requires_grad in (False, True):
        x = make(value, mesh_of((4,)), [Shard(0)], requires_grad=requires_grad)
        y = x.redistribute(placements=[Replicate()], async_op=True)
        assert "in flight" in repr(y)
        assert torch.equal(FIRST_USES[use](y).detach(), value)
        assert "in flight" not in repr(y)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("source", [Shard(0), Shard(1), Partial()])
@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1)])
def test_async_results_and_gradients_are_those_of_the_synchronous_call(source, target):
    value, weight = whole(5, 3), torch.cos(whole(5, 3))
    x = make(value, mesh_of((4,)), [source], requires_grad=True)
    y = x.redistribute(placements=[target], async_op=True)
    (y * make(weight, mesh_of((4,)), [target])).sum().backward()
    torch.testing.assert_close(y.detach().full_tensor(), value)
    torch.testing.assert_close(x.grad.full_tensor(), weight)


@pytest.mark.ranks(4)
def test_async_returns_before_the_other_ranks_have_come():
    """Rank 0 joins only after all others have gone on; were they to wait for it, nobody would ever end."""
    x = make(whole(5, 3), mesh_of((4,)), [Shard(0)], requires_grad=True)
    dist.barrier()
    others = [f"went on: {rank}" for rank in range(1, 4)]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(others, timedelta(seconds=60))
    y = x.redistribute(placements=[Replicate()], async_op=True)
    if dist.get_rank() != 0:
        store.set(others[dist.get_rank() - 1], "")
    torch.testing.assert_close(y.to_local().detach(), whole(5, 3))
    dist.barrier()
    for key in others[: 3 if dist.get_rank() == 0 else 0]:
        store.delete_key(key)


@pytest.mark.ranks(4)
def test_a_tensor_in_flight_tells_its_shape_and_layout_without_waiting():
    x = make(whole(5, 3), mesh_of((4,)), [Shard(0)])
    y = x.redistribute(placements=[Replicate()], async_op=True)
    assert (y.shape, y.local_shape, y.dtype, y.placements) == ((5, 3), (5, 3), torch.float64, (Replicate(),))
    assert not y.requires_grad
    assert isinstance(y, DTensor)
    assert "in flight" in repr(y)
    y.to_local()


@pytest.mark.ranks(4)
def test_an_async_gather_for_different_work_still_ends_in_a_reduce_scatter():
    x = make(whole(8, 3), mesh_of((4,)), [Shard(0)], requires_grad=True)
    weight = make(whole(3, 6), mesh_of((4,)), [Shard(1)])
    y = x.redistribute(placements=[Replicate()], async_op=True)
    with CommTrace() as trace:
        (y @ weight).sum().backward()
    assert trace.phase("backward") == {"reduce_scatter": 1}
    assert torch.equal(x.grad.full_tensor(), whole(3, 6).sum(1).expand(8, 3))
