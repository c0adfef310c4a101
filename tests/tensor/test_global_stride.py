"""The stride of a DTensor is that of one device: views are views, copies are copies, and the ranks agree on both."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh, redistribute_policy
from hyper_parallel.testing import make

R, P = Replicate(), Partial()


def mesh2():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def turned(*shape):
    """Values whose last two dims are swapped in memory."""
    return torch.arange(float(torch.Size(shape).numel())).view(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("target", [[R], [Shard(0)], [Shard(1)], [Shard(2)]], ids=str)
@pytest.mark.parametrize("source", [[R], [Shard(0)], [Shard(2)], [P]], ids=str)
def test_redistribution_keeps_stride_and_memory_order(source, target):
    value = turned(2, 5, 3)
    x = make(value, mesh2(), source)
    out = x.redistribute(placements=target)
    assert out.stride() == value.stride()
    # What is contiguous on one device is so here: the dims are merged without a copy.
    merged = out.transpose(1, 2).view(2, 15) if target != [Shard(2)] and target != [Shard(1)] else None
    if merged is not None:
        torch.testing.assert_close(merged.full_tensor(), value.transpose(1, 2).reshape(2, 15))
    torch.testing.assert_close(out.full_tensor(), value)
    with pytest.raises((RuntimeError, ValueError)):
        out.view(30)


@pytest.mark.ranks(2)
def test_asynchronous_redistribution_keeps_it_too():
    value = turned(5, 3)
    out = make(value, mesh2(), [Shard(0)]).redistribute(placements=[R], async_op=True)
    assert out.stride() == value.stride()
    torch.testing.assert_close(out.t().view(15).to_local(), value.t().reshape(15))


@pytest.mark.ranks(2)
def test_gradient_of_a_moved_transposed_tensor_equals_one_device():
    value = turned(5, 3)
    x = make(value, mesh2(), [Shard(0)], requires_grad=True)
    weight = torch.arange(15.0)
    (x.redistribute(placements=[R]).t().view(15) * make(weight, mesh2(), [R])).sum().backward()
    plain = value.clone().requires_grad_()
    (plain.t().reshape(15) * weight).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    assert x.grad.stride() == value.stride()


@pytest.mark.ranks(2)
def test_reducing_a_transposed_sum_inside_an_operator_keeps_it():
    value = turned(4, 3)
    out = make(value, mesh2(), [P]).exp()  # reduces
    assert out.stride() == value.exp().stride()
    torch.testing.assert_close(out.t().view(12).to_local(), value.exp().t().reshape(12))


@pytest.mark.ranks(2)
def test_view_after_expand_and_cast():
    value = torch.randn(2, 3, 1, 4)
    for placements in ([Shard(0)], [Shard(1)], [R]):
        x = make(value, mesh2(), placements).expand(2, 3, 2, 4).to(torch.float64)
        assert x.stride() == (24, 8, 4, 1)
        torch.testing.assert_close(
            x.view(2, 3, 8).full_tensor(), value.expand(2, 3, 2, 4).to(torch.float64).reshape(2, 3, 8)
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_ranks_agree_where_a_piece_does_not_tell_the_order(rows):
    """A rank that holds one row, or none, sees a contiguous piece where the others see a transposed one."""
    value = turned(rows, 3)
    x = make(value, mesh2(), [Shard(0)])
    out = x.exp()
    if rows > 1:
        assert out.stride() == value.exp().stride()
        with pytest.raises(RuntimeError):
            out.view(3 * rows)
    with redistribute_policy("auto"):
        torch.testing.assert_close(out.t().view(3 * rows).full_tensor(), value.exp().t().reshape(3 * rows))


@pytest.mark.ranks(2)
def test_local_kernel_that_chooses_another_order_is_put_right():
    """CPU's softmax gives a contiguous result; over a sharded dim the pieces are computed in another way."""
    value = torch.randn(6, 5).t()
    x = make(value, mesh2(), [Shard(0)], requires_grad=True)
    out = torch.softmax(x, 0)
    local, step = out.to_local(), out.stride()
    assert (local.stride(0) > local.stride(1)) == (step[0] > step[1])


@pytest.mark.ranks(2)
def test_stride_of_from_local_can_be_given():
    local = torch.arange(6.0).view(3, 2).t()
    x = DTensor.from_local(local, mesh2(), [Shard(0)])
    assert (tuple(x.shape), x.stride()) == ((4, 3), (1, 4))
    assert DTensor.from_local(local, mesh2(), [Shard(0)], shape=(4, 3), stride=(1, 4)).stride() == (1, 4)


@pytest.mark.ranks(2)
def test_casts_of_pending_sums_to_another_memory_order():
    value = torch.arange(24.0).view(1, 2, 3, 4)
    mesh = init_device_mesh("cpu", (2,))
    for pending in (Partial(), Partial("max")):
        x = DTensor.from_local(value, mesh, [pending])
        for name in ("double", "int", "bool"):
            found = getattr(x, name)(memory_format=torch.channels_last)
            want = getattr(x.full_tensor(), name)(memory_format=torch.channels_last)
            torch.testing.assert_close(found.full_tensor(), want)
            assert found.stride() == want.stride()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_casts_to_another_memory_order_copy_on_all_ranks(rows):
    """Also where a rank's piece, of one row or none, is in that order already."""
    value = torch.arange(rows * 12.0).view(rows, 3, 4).permute(0, 2, 1)
    x = make(value, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), [Shard(0), Shard(0)])
    for copy in (x.clone(memory_format=torch.contiguous_format), x.contiguous()):
        assert copy.is_contiguous()
        assert copy.to_local().is_contiguous()
        torch.testing.assert_close(copy.full_tensor(), value)
        copy.zero_()
        torch.testing.assert_close(x.full_tensor(), value)


@pytest.mark.ranks(2)
def test_order_of_a_result_does_not_depend_on_the_stride_of_a_single_element():
    """Of one column a rank, einsum chooses the order of its result by the stride from column to column, which is
    arbitrary: so it may at any call, not only at the first."""
    column, row = torch.arange(3.0), torch.arange(5.0)
    y = DTensor.from_local(row.as_strided((1, 5), (1, 1)), mesh2(), [Shard(0)], shape=(2, 5), stride=(1, 2))
    for step in (1, 3):
        local = column.as_strided((3, 1), (1, step))
        out = torch.einsum("ij,jk", DTensor.from_local(local, mesh2(), [Shard(1)], shape=(3, 2), stride=(1, 3)), y)
        assert out.stride() == (5, 1)
        assert out.to_local().is_contiguous()
        torch.testing.assert_close(out.full_tensor(), 2 * column[:, None] * row)
