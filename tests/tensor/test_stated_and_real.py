"""A local tensor is what its DTensor states: shape, strides, dtype, and which tensors share memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from hyper_parallel import (
    DFunction,
    DistributedOp,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    init_device_mesh,
    redistribute_policy,
)
from hyper_parallel.sharding.stated import difference
from hyper_parallel.testing import make

R = Replicate()


def mesh_of(ranks):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def turned(*shape, dtype=torch.float64):
    """Values whose last two dims are swapped in memory."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)


def assert_as_stated(*tensors):
    for tensor in tensors:
        assert difference(tensor._resolve(), tensor._spec) is None


CASTS = {
    "to_dtype": lambda x, **given: x.to(x.dtype, **given),
    "to_device": lambda x, **given: x.to("cpu", **given),
    "to_other": lambda x, **given: x.to(x, **given),
    "type_as": lambda x, **given: x.type_as(x),
    "double": lambda x, **given: x.double(**given),
    "cpu": lambda x, **given: x.cpu(**given),
    "float": lambda x, **given: x.float(**given),
    "to_with_copy": lambda x, **given: x.to(x.dtype, copy=True, **given),
    "contiguous": lambda x, **given: x.contiguous(**given),
    "clone": lambda x, **given: x.clone(**given),
}
FORMATS = {
    "preserve": torch.preserve_format,
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cast", CASTS)
def test_what_casts_return_is_the_tensor_itself_or_a_copy_as_on_one_device(cast, format):
    torch.manual_seed(0)
    change, given = CASTS[cast], {} if format == "preserve" else {"memory_format": FORMATS[format]}
    values = [turned(3, 5, 4), torch.randn(3, 5, 4), torch.randn(2, 3, 4, 5).permute(0, 2, 3, 1)]
    values += [torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.randn(4, 1).expand(4, 3)]
    for value in values:
        if format == "channels_last" and value.ndim != 4:
            continue
        for placement in (R, *map(Shard, range(value.ndim)), Partial()):
            x = make(value, mesh_of(2), [placement]) if 0 not in value.stride() else expanded(value, placement)
            got, want = change(x, **given), change(value, **given)
            assert (got is x) == (want is value)
            assert got.stride() == want.stride()
            assert_as_stated(got)
            apart = got._local.untyped_storage().data_ptr() != x._local.untyped_storage().data_ptr()
            assert apart == (want is not value)
            torch.testing.assert_close(got.full_tensor(), want)


def expanded(value, placement):
    column = make(value[:, :1].contiguous(), mesh_of(2), [R if placement == Shard(1) else placement])
    return column.expand(value.shape)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [R, Shard(0), Shard(1), Shard(2)], ids=str)
def test_a_cast_that_changes_nothing_then_reshape(placement):
    """As every Qwen3.5 and Qwen3-Next model does it in its linear attention."""
    value = torch.randn(2, 4, 8)
    x = make(value, mesh_of(2), [placement])
    y = x.transpose(1, 2).to(x.dtype, memory_format=torch.contiguous_format)
    with redistribute_policy("auto"):
        merged = y.reshape(-1, 8)
    torch.testing.assert_close(merged.full_tensor(), value.transpose(1, 2).reshape(-1, 8))


def writes(rows):
    """Functions that write along the last dim, of target, index and sources as their kinds take them."""
    vector = torch.tensor([2, 0, 1])
    places = vector.expand(rows, 3).contiguous()
    sources = torch.randn(rows, 3, dtype=torch.float64)
    return {
        "index_add": lambda x, d: x.index_add(1, d(vector), d(sources)),
        "index_copy": lambda x, d: x.index_copy(1, d(vector), d(sources)),
        "index_fill": lambda x, d: x.index_fill(1, d(vector), 2.0),
        "index_reduce": lambda x, d: x.index_reduce(1, d(vector), d(sources), "prod"),
        "scatter": lambda x, d: x.scatter(1, d(places), d(sources)),
        "scatter_value": lambda x, d: x.scatter(1, d(places), 3.0),
        "scatter_add": lambda x, d: x.scatter_add(1, d(places), d(sources)),
        "scatter_reduce": lambda x, d: x.scatter_reduce(1, d(places), d(sources), "amax"),
        "index_put": lambda x, d: x.index_put((slice_of_rows(d, rows), d(vector[:1])), d(sources[:, 0])),
        "masked_scatter": lambda x, d: x.masked_scatter(x > 0, d(torch.ones(rows * 9, dtype=torch.float64))),
        "select_scatter": lambda x, d: x.select_scatter(d(sources[:, 0]), 1, 0),
        "slice_scatter": lambda x, d: x.slice_scatter(d(sources), 1, 0, 3),
    }


def slice_of_rows(d, rows):
    return d(torch.arange(rows))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", list(writes(1)))
@pytest.mark.parametrize("width", [9, 5, 8])
def test_writing_along_the_sharded_last_dim_leaves_a_dense_tensor(name, width):
    """On four ranks 9 columns are 3, 3, 3 and none."""
    torch.manual_seed(0)
    write, mesh = writes(6)[name], mesh_of(4)
    value = torch.randn(6, width, dtype=torch.float64)
    x = make(value, mesh, [Shard(1)], requires_grad=True)
    plain = value.clone().requires_grad_()
    with redistribute_policy("auto"):
        got, want = write(x, lambda t: make(t, mesh, [R])), write(plain, lambda t: t)
        assert_as_stated(got)
        assert got.is_contiguous()
        flat, weight = got.t().contiguous().view(-1), torch.randn(6 * width, dtype=torch.float64)
        (flat * make(weight, mesh, [R])).sum().backward()
    (want.t().reshape(-1) * weight).sum().backward()
    torch.testing.assert_close(got.full_tensor(), want)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


PLACEMENTS = [R, Shard(0), Shard(1), Shard(2), Partial(), PackedShard(1, (2, 3))]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
def test_redistribution(source):
    for value in (torch.randn(3, 5, 4), turned(3, 5, 4), torch.randn(4, 5, 3).permute(2, 1, 0)):
        x = make(value, mesh_of(2), [source], requires_grad=True)
        for target in PLACEMENTS:
            got = x.redistribute(placements=[target])
            assert_as_stated(got)
            (gradient,) = torch.autograd.grad(got, x, make(value, mesh_of(2), got.grad_placements))
            assert_as_stated(gradient)


@pytest.mark.ranks(2)
def test_distribute_tensor():
    for value, placement, source in itertools.product(
        (turned(3, 5, 4), torch.randn(3, 10, 4)[:, ::2], torch.randn(3, 1, 4).expand(3, 5, 4)), PLACEMENTS, (0, None)
    ):
        if not isinstance(placement, Partial):
            assert_as_stated(distribute_tensor(value, mesh_of(2), [placement], src_data_rank=source))


PIECES = {
    "gap in rows": lambda piece: torch.cat([piece, piece], 1)[:, : piece.shape[1]],
    "every second": lambda piece: torch.repeat_interleave(piece, 2, 1)[:, ::2],
    "transposed": lambda piece: piece.t().contiguous().t(),
    "transposed, gap": lambda piece: torch.cat([piece.t(), piece.t()], 1)[:, : piece.shape[0]].t(),
    "repeated": lambda piece: piece[:, :1].expand(piece.shape),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [4, 3, 1])
@pytest.mark.parametrize("name", PIECES)
def test_from_local_states_the_gaps_of_the_piece(name, rows):
    """Where the ranks hold different amounts, it is a copy."""
    for placement in (Shard(0), Shard(1), R):
        shape = [rows, 6]
        piece = make(torch.randn(shape), mesh_of(2), [placement]).to_local()
        given = PIECES[name](piece)
        x = DTensor.from_local(given, mesh_of(2), [placement], shape=shape)
        assert_as_stated(x)
        torch.testing.assert_close(x.to_local(), given)
        if rows == 4:
            assert x.to_local().data_ptr() == given.data_ptr()
        with redistribute_policy("auto"):
            torch.testing.assert_close(x.reshape(-1).full_tensor(), x.full_tensor().reshape(-1))
        asked = DTensor.from_local(given, mesh_of(2), [placement], shape=shape, stride=(1, rows))
        assert_as_stated(asked)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [4, 3])
def test_custom_shard_that_returns_a_slice(rows):
    first = custom_shard(lambda t: t[:, :2], mesh_of(2), out_layouts=[Shard(0)])
    value = torch.randn(rows, 5)
    out = first(make(value, mesh_of(2), [Shard(0)]))
    assert_as_stated(out)
    with redistribute_policy("auto"):
        torch.testing.assert_close(out.reshape(-1).full_tensor(), value[:, :2].reshape(-1))


class Widened(DistributedOp):
    """By its three phases: a slice of something wider, or something transposed, of which nobody said the strides."""

    def infer_layout(self, layouts, extra_args):
        return layouts[0]

    def get_expand_impl(self, func, infer_result, cache_values):
        return lambda x: torch.cat([x, x], 1)[:, : x.shape[1]]


Widened("widened_of_the_tests")


class WidenedFunction(DFunction):
    _op_name = "widened_of_the_tests"

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [4, 3, 1])
def test_three_phase_rule_that_returns_a_slice(rows):
    value = torch.randn(rows, 5)
    x = make(value, mesh_of(2), [Shard(0)])
    for _ in range(2):
        out = WidenedFunction.apply(x)
        assert_as_stated(out)
        with redistribute_policy("auto"):
            torch.testing.assert_close(out.view(-1).full_tensor(), value.view(-1))


@pytest.mark.ranks(2)
def test_gradients_in_hooks_and_of_parameters():
    for value in (turned(4, 5), torch.randn(4, 5), torch.randn(4, 10)[:, ::2]):
        seen: list[DTensor] = []
        x = make(value, mesh_of(2), [Shard(0)], requires_grad=True)
        y = x * 2
        y.register_hook(seen.append)
        y.retain_grad()
        (y.t().contiguous() * make(torch.randn(5, 4), mesh_of(2), [Shard(1)])).sum().backward()
        assert_as_stated(*seen, x.grad, y.grad)
