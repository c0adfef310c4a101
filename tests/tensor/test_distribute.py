"""Tensors and modules put on a mesh: ``distribute_tensor``, ``distribute_module``, factories, PyTorch's DTensor."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_dtensor
from torch import nn

import hyper_parallel as hp
from hyper_parallel import (
    CommTrace,
    DTensor,
    Layout,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import piece_of


def whole(*shape, dtype=torch.float64):
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape) + 1


def layouts_of(ndim):
    flat, grid = mesh_of((4,)), mesh_of((2, 2))
    return [
        Layout.from_placements(flat, [Shard(0)], ndim=ndim),
        Layout.from_placements(flat, [Shard(-1)], ndim=ndim),
        Layout.from_placements(flat, [PackedShard(0, (5, 2))], ndim=ndim),
        Layout.from_placements(flat, [Replicate()], ndim=ndim),
        Layout.from_placements(grid, [Shard(0), Shard(1)], ndim=ndim),
        Layout.from_placements(grid, [Shard(1), Shard(0)], ndim=ndim),
        Layout.from_placements(grid, [Shard(0), Shard(0)], ndim=ndim),
        Layout.from_placements(grid, [Shard(0), Shard(0)], ndim=ndim, shard_order={0: ("tp", "dp")}),
        Layout.from_placements(grid, [Shard(0), PackedShard(0, (5, 2))], ndim=ndim),
        Layout.from_placements(grid, [Replicate(), Shard(1)], ndim=ndim),
    ]


# -- distribute_tensor --------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("src", [0, 1])
def test_the_data_of_the_source_rank_counts(src):
    for shape in ((7, 3), (7, 1), (7, 8)):
        for layout in layouts_of(2):
            source = src if layout.mesh.ndim == 1 else 3 * src  # index src along every axis
            mine = whole(*shape) + 1000 * dist.get_rank()
            x = distribute_tensor(mine, layout, src_data_rank=src)
            assert x.layout is layout
            assert torch.equal(x.to_local(), piece_of(whole(*shape) + 1000 * source, layout))
            assert x.to_local().is_contiguous()


@pytest.mark.ranks(4)
def test_without_source_rank_each_rank_slices_what_it_has_and_sends_nothing():
    mine = whole(7, 3) + 1000 * dist.get_rank()
    for layout in layouts_of(2):
        with CommTrace() as trace:
            x = distribute_tensor(mine, layout, src_data_rank=None)
        assert not trace.events
        assert torch.equal(x.to_local(), piece_of(mine, layout))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("what", ["shape", "number of dimensions", "dtype", "placements", "no tensor"])
def test_ranks_that_mean_different_tensors_are_told_and_none_waits(what):
    odd = dist.get_rank() == 2
    value = whole(8, 4)
    if odd:
        value = {"shape": whole(8, 5), "number of dimensions": whole(8), "dtype": value.float()}.get(what, value)
    placements = [Shard(1) if odd and what == "placements" else Shard(0)]
    if odd and what == "no tensor":
        with pytest.raises(TypeError, match="got NoneType"):
            distribute_tensor(None, mesh_of((4,)), placements)
        return
    with pytest.raises(ValueError, match=r"differs by rank(?s:.*)rank at \(2,\)"):
        distribute_tensor(value, mesh_of((4,)), placements)


@pytest.mark.ranks(4)
def test_the_whole_tensor_is_sent_once():
    """Scattered over the axes that shard it, and only the pieces broadcast over the others."""
    value = whole(8, 4)
    with CommTrace() as trace:
        distribute_tensor(value, mesh_of((2, 2)), [Replicate(), Shard(0)])
    checked = ("all_reduce", 16)  # that all ranks mean the same
    assert [(e.op, e.nbytes) for e in trace.events] == [checked, ("scatter", 8 * 16), ("broadcast", 8 * 16)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("src", [0, 1, None])
def test_a_pending_sum_adds_up_to_the_tensor(src):
    value = whole(5, 3)
    mine = value if src is None else value * (dist.get_rank() == (0 if src == 0 else 3))
    for placements in ([Partial(), Partial()], [Partial(), Shard(0)], [Replicate(), Partial()]):
        x = distribute_tensor(mine.clone(), mesh_of((2, 2)), placements, src_data_rank=src)
        assert x.placements == tuple(placements)
        assert torch.equal(x.full_tensor(), value)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_dtype(dtype):
    value = (whole(5, 3) % 3).to(dtype)
    for placements in ([Shard(0)], [Replicate()]):
        x = distribute_tensor(value, mesh_of((4,)), placements)
        assert x.dtype == dtype
        assert torch.equal(x.full_tensor(), value)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (2, 0), ()])
def test_empty_and_tiny_tensors(shape):
    value = whole(*shape)
    for placements in (
        ([Shard(0), Replicate()], [Shard(0), Shard(0)], [Replicate(), Replicate()]) if shape else ([Replicate()] * 2,)
    ):
        x = distribute_tensor(value, mesh_of((2, 2)), placements)
        assert x.shape == shape
        assert torch.equal(x.full_tensor(), value)


@pytest.mark.ranks(4)
def test_the_result_is_a_leaf_with_memory_of_its_own():
    value = whole(5, 3).requires_grad_()
    for src in (0, None):
        for placements in ([Shard(0)], [Replicate()]):
            x = distribute_tensor(value, mesh_of((4,)), placements, src_data_rank=src)
            assert x.requires_grad
            assert x.is_leaf
            x.data.zero_()
            assert torch.equal(value.detach(), whole(5, 3))
            (x * 2).sum().backward()
            assert x.grad is not None
            assert value.grad is None
    assert not distribute_tensor(whole(5, 3), mesh_of((4,)), [Shard(0)]).requires_grad


@pytest.mark.ranks(4)
def test_meta_tensors_stay_on_meta_and_send_nothing():
    with CommTrace() as trace:
        x = distribute_tensor(torch.empty(5, 3, device="meta"), mesh_of((4,)), [Shard(0)])
    assert not trace.events
    assert x.is_meta
    assert (x.shape, x.local_shape) == ((5, 3), ((2, 3), (2, 3), (1, 3), (0, 3))[dist.get_rank()])


@pytest.mark.ranks(4)
def test_strided_tensors_are_distributed_by_value():
    value = whole(5, 7).t()[::2]
    x = distribute_tensor(value, mesh_of((4,)), [Shard(0)])
    assert torch.equal(x.full_tensor(), value)


@pytest.mark.ranks(4)
def test_what_cannot_be_distributed_is_refused():
    mesh, value = mesh_of((4,)), whole(5, 3)
    x = distribute_tensor(value, mesh, [Shard(0)])
    assert distribute_tensor(x, mesh, [Shard(0)]) is x
    with pytest.raises(TypeError, match=r"on every rank, got NoneType.*torch.empty\(\(\)\).expand"):
        distribute_tensor(None, mesh_of((4,)), [Shard(0)])
    with pytest.raises(ValueError, match="use redistribute"):
        distribute_tensor(x, mesh, [Shard(1)])
    with pytest.raises(ValueError, match="leaf"):
        distribute_tensor(value.requires_grad_() * 2, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="src_data_rank 4 is out of range"):
        distribute_tensor(whole(5, 3), mesh, [Shard(0)], src_data_rank=4)
    with pytest.raises(ValueError, match="give one per axis"):
        distribute_tensor(whole(5, 3), mesh, [Shard(0), Shard(1)])
    with pytest.raises(ValueError, match="out of range"):
        distribute_tensor(whole(5, 3), mesh, [Shard(2)])
    with pytest.raises(ValueError, match="sections"):
        distribute_tensor(whole(5, 3), mesh, [PackedShard(0, (5, 2))])


# -- distribute_module --------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 6, dtype=torch.float64)
        self.fc2 = nn.Linear(6, 5, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor([2.0], dtype=torch.float64))

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x))) * self.scale


def column_then_row(name, module, mesh):
    placements = {"fc1": (Shard(0), Shard(0)), "fc2": (Shard(1), Replicate())}.get(name)
    if placements is not None:
        for (attribute, parameter), placement in zip(list(module.named_parameters()), placements, strict=True):
            setattr(module, attribute, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))


@pytest.mark.ranks(4)
def test_the_three_stages():
    torch.manual_seed(dist.get_rank())  # rank 0's parameters count
    net = Net()
    mesh = mesh_of((4,))
    calls = []

    def take(module, inputs, mesh):
        calls.append("in")
        return tuple(distribute_tensor(x, mesh, [Replicate()]) for x in inputs)

    def give(module, output, mesh):
        calls.append("out")
        return output.full_tensor()

    assert distribute_module(net, mesh, column_then_row, take, give) is net
    assert [p.placements for p in net.parameters()] == [(Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)]
    assert net.scale.placements == (Replicate(),)
    assert isinstance(net.scale, DTensor)
    torch.manual_seed(0)
    plain, x = Net(), whole(5, 3) / 15
    out = net(x)
    assert calls == ["in", "out"]
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, plain(x))
    out.square().sum().backward()
    plain(x).square().sum().backward()
    for got, want in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


@pytest.mark.ranks(4)
def test_what_the_partition_leaves_plain_is_replicated():
    net = Net()
    net.fc1.weight.requires_grad_(False)
    net.fc2.bias.tag = "kept"
    tied = nn.Linear(3, 6, dtype=torch.float64)
    tied.weight = net.fc1.weight
    net.tied = tied
    distribute_module(net, mesh_of((4,)))
    assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in net.parameters())
    assert {p.placements for p in net.parameters()} == {(Replicate(),)}
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == ["fc1.weight"]
    assert net.tied.weight is net.fc1.weight
    assert net.fc2.bias.tag == "kept"


@pytest.mark.ranks(4)
def test_a_second_application_is_refused():
    net = distribute_module(Net(), mesh_of((4,)))
    with pytest.raises(RuntimeError, match="distributed before"):
        distribute_module(net, mesh_of((4,)))


@pytest.mark.ranks(4)
def test_a_module_around_a_distributed_one_leaves_it_as_it_is():
    net = distribute_module(Net(), mesh_of((4,)), column_then_row)
    placements = [p.placements for p in net.parameters()]
    outer = distribute_module(nn.Sequential(net, nn.Linear(5, 2, dtype=torch.float64)), mesh_of((4,)))
    assert [p.placements for p in outer.parameters()] == [*placements, (Replicate(),), (Replicate(),)]


@pytest.mark.ranks(4)
def test_functions_of_the_wrong_form_are_refused_before_anything_is_changed():
    net = Net()
    with pytest.raises(ValueError, match="input_fn takes"):
        distribute_module(net, mesh_of((4,)), column_then_row, input_fn=lambda inputs: inputs)
    with pytest.raises(ValueError, match="output_fn takes"):
        distribute_module(net, mesh_of((4,)), column_then_row, output_fn=lambda a, b, c, d: a)
    assert not any(isinstance(p, DTensor) for p in net.parameters())

    def give(module, output, mesh, factor=1):
        return output * factor

    distribute_module(net, mesh_of((4,)), output_fn=functools.partial(give, factor=2))


# -- factories ----------------------------------------------------------------------------------------------------


FACTORIES = {
    "zeros": lambda make, **options: make.zeros(7, 3, **options),
    "zeros of a list": lambda make, **options: make.zeros([7, 3], **options),
    "ones": lambda make, **options: make.ones((7, 3), **options),
    "full": lambda make, **options: make.full((7, 3), 5, **options),
    "rand": lambda make, **options: make.rand(7, 3, **options),
    "randn": lambda make, **options: make.randn((7, 3), **options),
    "arange": lambda make, **options: make.arange(7, **options),
    "arange with step": lambda make, **options: make.arange(1, 20, 3, **options),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.int32])
def test_factories_make_the_tensors_of_torch(name, dtype):
    if name.startswith("rand") and dtype is torch.int32:
        pytest.skip("random integers have a function of their own")
    make = FACTORIES[name]
    torch.manual_seed(3)
    expected = make(torch, dtype=dtype)
    after = torch.rand(1)
    of_a_vector = [
        Layout.from_placements(mesh_of((2, 2)), placements, ndim=1)
        for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()])
    ]
    for layout in layouts_of(2) if expected.ndim == 2 else of_a_vector:
        torch.manual_seed(3)
        x = make(hp, dtype=dtype, device_mesh=layout)
        assert isinstance(x, DTensor)
        assert (x.layout, x.dtype, x.shape, x.stride()) == (layout, expected.dtype, expected.shape, expected.stride())
        assert torch.equal(x.full_tensor(), expected)
        assert torch.equal(torch.rand(1), after)  # the generator is where one device would leave it


@pytest.mark.ranks(4)
def test_factory_arguments():
    mesh = mesh_of((2, 2))
    x = hp.empty(7, 3, dtype=torch.float32, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    assert (x.shape, x.dtype, x.placements) == ((7, 3), torch.float32, (Shard(0), Shard(1)))
    assert hp.zeros(7, 3, device_mesh=mesh).placements == (Replicate(), Replicate())
    y = hp.ones(7, 3, requires_grad=True, device_mesh=mesh, placements=[Shard(0), Replicate()])
    assert y.requires_grad
    assert y.is_leaf
    assert hp.full((), 2.0, device_mesh=mesh).full_tensor() == 2.0
    for pending in (
        [Partial(), Replicate()],
        [Partial(), Shard(0)],
        [Partial(), Partial()],
        [Partial("max"), Replicate()],
    ):
        z = hp.full((7, 3), 5.0, device_mesh=mesh, placements=pending)
        assert z.placements == tuple(pending)
        assert torch.equal(z.full_tensor(), torch.full((7, 3), 5.0))
        torch.manual_seed(0)
        expected = torch.rand(7, 3)
        torch.manual_seed(0)
        torch.testing.assert_close(hp.rand(7, 3, device_mesh=mesh, placements=pending).full_tensor(), expected)
    with pytest.raises(ValueError, match="device_mesh is missing"):
        hp.zeros(7, 3)
    with pytest.raises(ValueError, match="dimensions"):
        hp.zeros(7, 3, device_mesh=mesh, placements=[Shard(2), Replicate()])


# -- PyTorch's own DTensor ----------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_to_and_from_torchs_dtensor():
    value, mesh = whole(7, 3), mesh_of((2, 2))
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Partial(), Replicate()]):
        x = distribute_tensor(value, mesh, placements)
        theirs = x.to_torch()
        assert isinstance(theirs, torch_dtensor.DTensor)
        assert (theirs.placements, theirs.shape, theirs.device_mesh) == (tuple(placements), x.shape, mesh)
        torch.testing.assert_close(theirs.full_tensor(), value)
        back = DTensor.from_torch(theirs)
        assert back.layout is x.layout
        back.mul_(2)  # the memory is shared
        torch.testing.assert_close(x.full_tensor(), 2 * value)


@pytest.mark.ranks(4)
def test_gradients_cross_between_the_libraries():
    value, mesh = whole(7, 3), mesh_of((2, 2))
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Replicate()]):
        x = distribute_tensor(value, mesh, placements).requires_grad_()
        (x.to_torch() * 3).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full((7, 3), 3.0, dtype=torch.float64))
        theirs = torch_dtensor.distribute_tensor(value, mesh, placements).requires_grad_()
        (DTensor.from_torch(theirs) * 3).sum().backward()
        assert torch.equal(theirs.grad.full_tensor(), torch.full((7, 3), 3.0, dtype=torch.float64))


@pytest.mark.ranks(4)
def test_layouts_that_torch_cannot_describe_are_refused():
    mesh = mesh_of((2, 2))
    packed = distribute_tensor(whole(7, 3), mesh_of((4,)), [PackedShard(0, (5, 2))])
    swapped = distribute_tensor(
        whole(7, 3), Layout.from_placements(mesh, [Shard(0), Shard(0)], ndim=2, shard_order={0: ("tp", "dp")})
    )
    for x in (packed, swapped):
        with pytest.raises(ValueError, match="cannot describe"):
            x.to_torch()
    with pytest.raises(TypeError, match="got Tensor"):
        DTensor.from_torch(whole(7, 3))
