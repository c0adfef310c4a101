"""What a DTensor is made from, what it says about itself, and how its local tensor comes out again."""

import pytest
import torch

from hyper_parallel import DTensor, Layout, PackedShard, Partial, Replicate, Shard
from hyper_parallel.testing.checking import mesh_of
from hyper_parallel.testing.placing import make, piece_of


def whole(*shape, dtype=torch.float64):
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape) + 1


def rank():
    return torch.distributed.get_rank()


# -- from_local ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_from_local_takes_every_rank_to_hold_as_much():
    x = DTensor.from_local(torch.full((2, 3), float(rank())), mesh_of((4,)), [Shard(0)])
    assert x.shape == (8, 3)
    assert torch.equal(x.full_tensor()[:, 0], torch.arange(4.0).repeat_interleave(2))


@pytest.mark.ranks(4)
def test_from_local_of_uneven_shards_needs_the_global_shape():
    value = whole(5, 3)
    layout = Layout.from_placements(mesh_of((4,)), [Shard(0)], ndim=2)
    piece = piece_of(value, layout)
    x = DTensor.from_local(piece, mesh_of((4,)), [Shard(0)], shape=(5, 3))
    assert x.local_shape == ((2, 3), (2, 3), (1, 3), (0, 3))[rank()]
    assert torch.equal(x.full_tensor(), value)
    with pytest.raises(ValueError, match="does not fit global shape"):
        DTensor.from_local(piece, mesh_of((4,)), [Shard(0)], shape=(12, 3))


@pytest.mark.ranks(4)
def test_from_local_of_a_packed_shard_knows_the_global_size_from_its_sections():
    placement = PackedShard(0, (5, 2))
    value = whole(7)
    piece = piece_of(value, Layout.from_placements(mesh_of((4,)), [placement], ndim=1))
    x = DTensor.from_local(piece, mesh_of((4,)), [placement])
    assert x.shape == (7,)
    assert torch.equal(x.full_tensor(), value)


@pytest.mark.ranks(4)
def test_from_local_takes_a_layout_in_each_of_its_forms():
    mesh = mesh_of((2, 2))
    value = whole(3, 5)
    layouts = [
        Layout.from_placements(mesh, [Shard(0), Shard(1)], ndim=2),
        Layout((2, 2), ("dp", "tp"))("dp", "tp"),
        Layout.from_placements(mesh, [Shard(1), Shard(1)], ndim=2, shard_order={1: ("tp", "dp")}),
    ]
    for layout in layouts:
        x = DTensor.from_local(piece_of(value, layout), layout, shape=value.shape)
        assert x.layout == layout
        assert torch.equal(x.full_tensor(), value)


@pytest.mark.ranks(4)
def test_from_local_keeps_the_dim_order_in_memory():
    x = DTensor.from_local(torch.zeros(3, 2).t(), mesh_of((4,)), [Shard(0)])
    assert x.shape == (8, 3)
    assert x.stride() == (1, 8)
    assert not x.is_contiguous()
    y = DTensor.from_local(torch.zeros(2, 3), mesh_of((4,)), [Replicate()], shape=(2, 3), stride=(3, 1))
    assert y.stride() == (3, 1)


@pytest.mark.ranks(4)
def test_run_check_finds_replicas_that_differ():
    mesh = mesh_of((2, 2))
    same_over_tp = torch.full((2,), float(rank() // 2))
    DTensor.from_local(same_over_tp, mesh, [Shard(0), Replicate()], run_check=True)
    DTensor.from_local(torch.tensor([1.0, torch.nan]), mesh, [Replicate(), Replicate()], run_check=True)
    DTensor.from_local(torch.tensor([True, False]), mesh, [Replicate(), Replicate()], run_check=True)
    with pytest.raises(ValueError, match="different values"):
        DTensor.from_local(same_over_tp, mesh, [Replicate(), Replicate()], run_check=True)
    with pytest.raises(ValueError, match="different values"):
        DTensor.from_local(torch.full((2,), float(rank())), mesh, [Shard(0), Replicate()], run_check=True)


@pytest.mark.ranks(4)
def test_run_check_finds_dtypes_that_differ_on_every_rank():
    piece = torch.zeros(2, dtype=torch.bfloat16 if rank() == 1 else torch.float32)
    with pytest.raises(ValueError, match=r"differs by rank(?s:.*)\(0,\): torch\.float32.*\n.*\(1,\): torch\.bfloat16"):
        DTensor.from_local(piece, mesh_of((4,)), [Shard(0)], run_check=True)
    with pytest.raises(ValueError, match=r"\(3,\): torch\.float32, 2 dimensions"):
        DTensor.from_local(torch.zeros(2, *[1] * (rank() == 3)), mesh_of((4,)), [Shard(0)], run_check=True)


@pytest.mark.ranks(4)
def test_run_check_finds_shapes_that_do_not_fit_on_every_rank():
    mesh = mesh_of((4,))
    uneven = torch.zeros(2 if rank() < 2 else 1)
    with pytest.raises(ValueError, match="shape="):
        DTensor.from_local(uneven, mesh, [Shard(0)], run_check=True)
    # Only rank 3 is wrong; the others must not be left waiting.
    one_wrong = torch.zeros(2 if rank() < 3 else 1)
    with pytest.raises(ValueError, match="global shape"):
        DTensor.from_local(one_wrong, mesh, [Shard(0)], run_check=True, shape=(8,))


@pytest.mark.ranks(4)
def test_from_local_says_what_is_wrong_with_its_arguments():
    mesh, local = mesh_of((4,)), torch.zeros(2, 3)
    x = DTensor.from_local(local, mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"plain tensor, got hyper_parallel\.tensor\.dtensor\.DTensor"):
        DTensor.from_local(x, mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"plain tensor, got builtins\.list"):
        DTensor.from_local([1.0], mesh, [Shard(0)])
    with pytest.raises(ValueError, match="stride needs shape"):
        DTensor.from_local(local, mesh, [Shard(0)], stride=(3, 1))
    with pytest.raises(ValueError, match="2 dimensions"):
        DTensor.from_local(local, mesh, [Shard(2)])
    with pytest.raises(ValueError, match="give one per axis"):
        DTensor.from_local(local, mesh, [Shard(0), Replicate()])
    with pytest.raises(ValueError, match="from_local: device_mesh is missing"):
        DTensor.from_local(local)
    with pytest.raises(ValueError, match="2 dimensions"):
        DTensor.from_local(local, mesh, [Shard(0)], shape=(8,))
    with pytest.raises(ValueError, match="stride"):
        DTensor.from_local(local, mesh, [Shard(0)], shape=(8, 3), stride=(1,))
    with pytest.raises(ValueError, match="grad_placements"):
        DTensor.from_local(local, mesh, [Shard(0)], grad_placements=[Replicate(), Replicate()])
    with pytest.raises(ValueError, match="grad_placements"):
        DTensor.from_local(local, mesh, [Shard(0)], grad_placements=[Shard(1)])
    with pytest.raises(TypeError, match="no constructor"):
        DTensor(local)


# -- gradients through the boundary -------------------------------------------------------------------------------


def gradient_through_from_local(placement, grad_placements):
    """The gradient of rank r's local tensor when the loss is ``sum(coefficients * full_tensor)``."""
    local = torch.full((2,), float(rank()), dtype=torch.float64, requires_grad=True)
    x = DTensor.from_local(local, mesh_of((4,)), [placement], grad_placements=grad_placements)
    value = x.full_tensor()
    (value * whole(*value.shape)).sum().backward()
    return local.grad


@pytest.mark.ranks(4)
def test_from_local_gives_each_rank_the_gradient_of_its_piece():
    full = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert torch.equal(gradient_through_from_local(Shard(0), None), full + 2 * rank())
    assert torch.equal(gradient_through_from_local(Partial(), None), full)
    assert torch.equal(gradient_through_from_local(Replicate(), None), full)
    assert torch.equal(gradient_through_from_local(Replicate(), [Replicate()]), full)
    # As terms of a sum, all of it on one rank.
    assert torch.equal(gradient_through_from_local(Replicate(), [Partial()]), full if rank() == 0 else 0 * full)
    assert torch.equal(gradient_through_from_local(Partial(), [Partial()]), full if rank() == 0 else 0 * full)


@pytest.mark.ranks(4)
def test_the_local_leaf_and_not_the_dtensor_gets_the_gradient_of_from_local():
    local = torch.zeros(2, requires_grad=True)
    x = DTensor.from_local(local, mesh_of((4,)), [Shard(0)])
    assert x.requires_grad
    assert not x.is_leaf
    x.to_local().sum().backward()
    assert x.grad is None
    assert torch.equal(local.grad, torch.ones(2))


def gradient_through_to_local(placement, grad_placements, varying=()):
    """Gradient of a leaf DTensor when rank r multiplies its piece by r + 1."""
    x = make(whole(4), mesh_of((4,)), [placement], requires_grad=True, varying=varying)
    local = x.to_local(grad_placements=grad_placements)
    (local * (rank() + 1)).sum().backward()
    return x.grad


@pytest.mark.ranks(4)
def test_to_local_takes_the_local_gradient_as_its_grad_placements_say():
    ones = torch.ones(4, dtype=torch.float64)
    assert gradient_through_to_local(Replicate(), [Partial()]).placements == (Replicate(),)
    assert torch.equal(gradient_through_to_local(Replicate(), [Partial()]).to_local(), 10 * ones)
    # By default the caller vouches that the gradient is the same everywhere; here it is not, and stays as it is.
    assert torch.equal(gradient_through_to_local(Replicate(), None).to_local(), (rank() + 1) * ones)
    assert torch.equal(gradient_through_to_local(Replicate(), [Replicate()]).to_local(), (rank() + 1) * ones)
    # Slices are slices, whatever is said.
    sharded = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    assert torch.equal(gradient_through_to_local(Shard(0), None).full_tensor(), sharded)
    assert torch.equal(gradient_through_to_local(Shard(0), [Shard(0)]).full_tensor(), sharded)
    # A pending sum: each rank's term has the whole gradient, so the ranks' terms are summed.
    assert torch.equal(gradient_through_to_local(Partial(), [Partial()]).to_local(), 10 * ones)
    # A varying tensor keeps its own gradient type: the terms are not summed before someone needs the sum.
    varying = gradient_through_to_local(Replicate(), None, varying=[0])
    assert varying.placements == (Partial(),)
    assert torch.equal(varying.full_tensor(), 10 * ones)


@pytest.mark.ranks(4)
def test_grad_placements_that_cannot_be_are_refused():
    x = make(whole(4), mesh_of((4,)), [Shard(0)], requires_grad=True)
    with pytest.raises(ValueError, match="grad_placements"):
        x.to_local(grad_placements=[Replicate()])
    with pytest.raises(ValueError, match="grad_placements"):
        x.to_local(grad_placements=[Shard(0), Shard(0)])
    y = make(whole(4), mesh_of((4,)), [Replicate()], requires_grad=True)
    with pytest.raises(ValueError, match="grad_placements"):
        y.to_local(grad_placements=[Shard(0)])


@pytest.mark.ranks(4)
def test_to_local_of_a_tensor_without_gradient_is_the_local_tensor_itself():
    local = torch.zeros(2)
    x = DTensor.from_local(local, mesh_of((4,)), [Shard(0)])
    assert x.to_local() is local
    assert x.to_local(grad_placements=[Shard(0)]) is local


@pytest.mark.ranks(4)
def test_full_tensor_is_plain_and_equal_on_every_rank():
    mesh, value = mesh_of((2, 2)), whole(5, 3)
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Partial(), Shard(1)],
        [Partial("max"), Replicate()],
    ):
        full = make(value, mesh, placements).full_tensor()
        assert type(full) is torch.Tensor
        torch.testing.assert_close(full, value)


@pytest.mark.ranks(4)
def test_full_tensor_sums_the_ranks_gradients_when_told_so():
    x = make(whole(5), mesh_of((4,)), [Shard(0)], requires_grad=True)
    (x.full_tensor(grad_placements=[Partial()]) * (rank() + 1)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5,), 10.0, dtype=torch.float64))


@pytest.mark.ranks(4)
def test_reduce_partial_reduces_only_what_is_pending():
    mesh, value = mesh_of((2, 2)), whole(5, 3)
    x = make(value, mesh, [Partial(), Shard(0)])
    reduced = x.reduce_partial()
    assert reduced.placements == (Replicate(), Shard(0))
    torch.testing.assert_close(reduced.full_tensor(), value)
    assert x.placements == (Partial(), Shard(0))
    whole_tensor = make(value, mesh, [Replicate(), Shard(0)])
    assert whole_tensor.reduce_partial() is whole_tensor


# -- what it says about itself ------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_sizes_are_those_of_the_global_tensor():
    mesh = mesh_of((2, 2))
    x = make(whole(5, 3), mesh, [Shard(0), Replicate()])
    assert (x.shape, x.size(), x.size(0), x.size(-1), x.size(dim=1)) == ((5, 3), (5, 3), 5, 3, 3)
    assert (x.ndim, x.dim(), x.numel(), x.nelement(), len(x)) == (2, 2, 15, 15, 5)
    assert (x.stride(), x.stride(0), x.stride(-1)) == ((3, 1), 3, 1)
    assert isinstance(x.shape, torch.Size)
    assert x.local_shape == ((3, 3), (2, 3))[rank() // 2]
    assert (x.element_size(), x.itemsize, x.nbytes) == (8, 8, 120)
    assert (x.is_contiguous(), x.is_floating_point(), x.is_complex(), x.is_sparse) == (True, True, False, False)
    with pytest.raises(IndexError):
        x.size(2)
    with pytest.raises(TypeError, match="0-d"):
        len(make(torch.tensor(1.0), mesh, [Replicate(), Replicate()]))


@pytest.mark.ranks(4)
def test_layout_properties():
    mesh = mesh_of((2, 2))
    x = make(whole(5, 3), mesh, [Shard(-2), Partial()])
    assert x.placements == (Shard(0), Partial())
    assert x.device_mesh == mesh
    assert x.layout is Layout.from_placements(mesh, [Shard(0), Partial()], ndim=2)
    assert x.grad_placements == (Shard(0), Replicate())
    assert (x.dtype, x.device, x.is_cpu, x.is_meta) == (torch.float64, torch.device("cpu"), True, False)
    varying = make(whole(5, 3), mesh, [Shard(0), Replicate()], varying=[1])
    assert varying.grad_placements == (Shard(0), Partial())


@pytest.mark.ranks(4)
def test_repr_reads_well_and_does_not_communicate():
    mesh = mesh_of((2, 2))
    x = make(whole(3), mesh, [Shard(0), Partial()], requires_grad=True)
    if rank() == 0:  # on one rank only: communication would hang
        text = repr(x)
        assert "DTensor(shape=(3,), dtype=float64, Layout(dp=2xtp=2 | dp: S(0), tp: P(sum)), requires_grad=True" in text
        assert "local=tensor(" in text
        assert str(x) == text
        assert f"{x}" == text
        assert "gradient Partial over ('tp',)" in repr(make(whole(3), mesh, [Shard(0), Replicate()], varying=[1]))
        assert repr(torch.nn.Parameter(x)).startswith("Parameter DTensor(")


@pytest.mark.ranks(4)
def test_iterating_gives_the_rows():
    value = whole(3, 5)
    rows = list(make(value, mesh_of((4,)), [Shard(1)]))
    assert [r.placements for r in rows] == [(Shard(0),)] * 3
    for row, expected in zip(rows, value, strict=True):
        assert torch.equal(row.full_tensor(), expected)


# -- data, detach, requires_grad_, conversions --------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_detach_shares_memory_and_drops_history():
    x = make(whole(5), mesh_of((4,)), [Shard(0)], requires_grad=True)
    y = (x * 2).detach()
    assert not y.requires_grad
    assert y.is_leaf
    assert y.placements == (Shard(0),)
    z = x.detach()
    z.mul_(3)
    assert torch.equal(x.full_tensor().detach(), 3 * whole(5))
    w = x * 2
    w.detach_()
    assert w.is_leaf
    assert not w.requires_grad


@pytest.mark.ranks(4)
def test_requires_grad_is_asked_of_leaves():
    x = make(whole(5), mesh_of((4,)), [Shard(0)])
    assert x.requires_grad_() is x
    assert x.requires_grad
    x.requires_grad = False
    assert not x.requires_grad
    x.requires_grad = True
    y = x * 2
    assert (x.is_leaf, y.is_leaf, x.grad_fn) == (True, False, None)
    assert y.grad_fn is not None
    with pytest.raises(RuntimeError, match="leaf"):
        y.requires_grad_(False)
    with pytest.raises(RuntimeError, match="floating point"):
        make(torch.arange(5), mesh_of((4,)), [Shard(0)]).requires_grad_()


@pytest.mark.ranks(4)
def test_conversions_keep_layout_and_carry_gradients():
    value = whole(5)
    x = make(value, mesh_of((4,)), [Shard(0)], requires_grad=True)
    converted = {
        torch.float32: [x.float(), x.to(torch.float32), x.type(torch.float32), x.type("torch.FloatTensor")],
        torch.float16: [x.half(), x.to(dtype=torch.float16)],
        torch.bfloat16: [x.bfloat16(), x.to("cpu", torch.bfloat16)],
        torch.float64: [x.double(), x.to("cpu"), x.to(x), x.type_as(x), x.cpu()],
    }
    for dtype, tensors in converted.items():
        for tensor in tensors:
            assert (tensor.dtype, tensor.placements, tensor.shape) == (dtype, (Shard(0),), (5,))
            assert torch.equal(tensor.full_tensor(), value.to(dtype))
            (gradient,) = torch.autograd.grad(tensor.sum(), x)
            assert gradient.dtype == torch.float64
            assert torch.equal(gradient.full_tensor(), torch.ones_like(value))
    assert x.type() == "torch.DoubleTensor"


@pytest.mark.ranks(4)
def test_a_pending_sum_stays_pending_when_it_is_cast():
    x = make(whole(5), mesh_of((4,)), [Partial()])
    assert x.to(torch.float32).placements == (Partial(),)
    assert x.to(torch.int64).placements == (Replicate(),)  # rounding terms is not rounding their sum


@pytest.mark.ranks(4)
def test_data_shares_memory_and_can_be_replaced():
    mesh = mesh_of((4,))
    x = make(whole(5), mesh, [Shard(0)], requires_grad=True)
    x.data.mul_(2)
    assert torch.equal(x.detach().full_tensor(), 2 * whole(5))
    assert x._version == 0
    x.data = make(whole(5) + 1, mesh, [Replicate()])
    assert x.placements == (Shard(0),)
    assert x.requires_grad
    assert torch.equal(x.detach().full_tensor(), whole(5) + 1)
    x.data = x.data.float()
    assert (x.dtype, x.requires_grad, x.is_leaf) == (torch.float32, True, True)
    (x * 1.0).sum().backward()
    assert x.grad.dtype == torch.float32
    with pytest.raises(TypeError, match="DTensor"):
        x.data = torch.zeros(5)


@pytest.mark.ranks(4)
def test_replacing_or_writing_data_is_seen_by_what_was_remembered():
    mesh = mesh_of((4,))
    scale = make(whole(5), mesh, [Shard(0)])
    w = make(whole(5), mesh, [Replicate()], requires_grad=True)
    pending = make(whole(5), mesh, [Partial()])

    def products():
        added = (pending + 0).full_tensor()  # takes the reduced form if there is one
        return (w * scale).full_tensor().detach(), added, pending.reduce_partial().full_tensor()

    products()
    w.data = make(10 * whole(5), mesh, [Replicate()])
    pending.data = make(10 * whole(5), mesh, [Partial()])
    for got, expected in zip(products(), (10 * whole(5) ** 2, 10 * whole(5), 10 * whole(5)), strict=True):
        torch.testing.assert_close(got, expected)
    w.data.mul_(2)
    pending.data.mul_(2)
    for got, expected in zip(products(), (20 * whole(5) ** 2, 20 * whole(5), 20 * whole(5)), strict=True):
        torch.testing.assert_close(got, expected)
