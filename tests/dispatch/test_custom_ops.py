"""Operators of a user's own: DFunction, DistributedOp in both forms, YAML and programmatic registration,
custom_shard."""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    CommTrace,
    DFunction,
    DistributedOp,
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    get_distributed_op,
    init_device_mesh,
    load_op_table,
    register_distributed_op,
)
from hyper_parallel.errors import MissingOpError, RedistributionError

R, P = Replicate(), Partial()


def mesh2x2():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def leaf(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def spread(tensor, *placements):
    return distribute_tensor(tensor, mesh2x2(), placements, src_data_rank=None)


def check_gradients(pairs):
    for distributed, plain in pairs:
        assert distributed.grad.placements == distributed.placements
        torch.testing.assert_close(distributed.grad.full_tensor(), plain.grad)


class GatedProduct(DFunction):
    """``sigmoid(x) * scale`` and its row sums, with saved tensors, a number and an argument without gradient."""

    _op_name = "gated_product_of_the_tests"

    @staticmethod
    def forward(ctx, x, scale, factor=1.0):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(gate, scale)
        ctx.factor = factor
        return gate * scale * factor, (gate * scale).sum(-1)

    @staticmethod
    def backward(ctx, grad, grad_sum):
        gate, scale = ctx.saved_tensors
        whole = grad * ctx.factor + grad_sum.unsqueeze(-1)
        dx = whole * scale * gate * (1 - gate) if ctx.needs_input_grad[0] else None
        ds = (whole * gate).sum(0) if ctx.needs_input_grad[1] else None
        return dx, ds, None


class GatedProductOp(DistributedOp):
    """Rows may be sharded; the scale is whole."""

    def infer_layout(self, cache_values):
        x, scale = cache_values[0], cache_values[1]
        self._check_partial_inputs([x, scale])
        if x.shard_order[1] or not scale.is_replicated():
            raise ValueError(f"{self.op_name}: only dim 0 of x may be sharded, got {x} and {scale}")
        return (x, x.move_dims([0, None], 1)), None


class OldFormOp(DistributedOp):
    """The older two-argument form of the same rule."""

    def infer_layout(self, layouts, extra_args):
        x, _ = layouts
        assert extra_args
        assert isinstance(extra_args[-1], float)
        return x, x.move_dims([0, None], 1)


def gated_product(x, scale, factor=1.0):
    gate = torch.sigmoid(x)
    return gate * scale * factor, (gate * scale).sum(-1)


def register(op_class):
    # The ranks live on from test to test, and so do their registrations: say that this one replaces another.
    register_distributed_op(GatedProduct._op_name, op_class(GatedProduct._op_name), override=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("op_class", [GatedProductOp, OldFormOp])
@pytest.mark.parametrize("placements", [(R, R), (Shard(0), R), (Shard(0), Shard(0))])
def test_dfunction_equals_one_device_in_both_forms_of_the_rule(op_class, placements):
    register(op_class)
    x, scale = leaf(6, 3), leaf(3, seed=1)
    out, sums = gated_product(x, scale, 2.0)
    (out.pow(2).sum() + sums.sum()).backward()
    dx, ds = spread(x, *placements), spread(scale, R, R)
    result, result_sums = GatedProduct.apply(dx, ds, 2.0)
    assert result.placements == placements
    torch.testing.assert_close(result.full_tensor(), out.detach())
    torch.testing.assert_close(result_sums.full_tensor(), sums.detach())
    (result.pow(2).sum() + result_sums.sum()).backward()
    check_gradients([(dx, x), (ds, scale)])


@pytest.mark.ranks(4)
def test_dfunction_twice_in_one_graph_and_with_keyword_arguments():
    register(GatedProductOp)
    x, scale = leaf(6, 3), leaf(3, seed=1)
    first, _ = gated_product(x, scale, 2.0)
    second, _ = gated_product(first, scale)
    second.pow(2).sum().backward()
    dx, ds = spread(x, Shard(0), R), spread(scale, R, R)
    first, _ = GatedProduct.apply(dx, scale=ds, factor=2.0)
    second, _ = GatedProduct.apply(first, ds)
    second.pow(2).sum().backward()
    check_gradients([(dx, x), (ds, scale)])


def test_dfunction_on_plain_tensors_takes_the_single_device_path():
    x, scale = leaf(6, 3), leaf(3, seed=1)
    out, _ = GatedProduct.apply(x, scale, 2.0)
    assert type(out) is torch.Tensor
    out.sum().backward()
    expected, scale2 = leaf(6, 3), leaf(3, seed=1)
    gated_product(expected, scale2, 2.0)[0].sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)
    torch.testing.assert_close(scale.grad, scale2.grad)


class Nameless(DFunction):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Unknown(Nameless):
    _op_name = "nobody_registered_this"


@pytest.mark.ranks(2)
def test_dfunction_without_a_rule_says_so():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="_op_name"):
        Nameless.apply(x)
    with pytest.raises(MissingOpError, match="nobody_registered_this"):
        Unknown.apply(x)


class SummedInside(DFunction):
    """Reduces its weight's gradient over tp by itself, and says so."""

    _op_name = "summed_inside_of_the_tests"
    grad_placements = (None, (R, R))

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        mesh = mesh2x2()
        gw = (grad * x).sum(0)
        for axis in ("dp", "tp"):
            torch.distributed.all_reduce(gw, group=mesh.get_group(axis))
        return grad * w, gw


class SummedInsideOp(DistributedOp):
    def infer_layout(self, cache_values):
        return (cache_values[0],), None


@pytest.mark.ranks(4)
def test_dfunction_grad_placements_override_the_rule():
    SummedInsideOp("summed_inside_of_the_tests")
    x, w = leaf(8, 3), leaf(3, seed=1)
    (x * w).pow(2).sum().backward()
    dx, dw = spread(x, Shard(0), Shard(0)), spread(w, R, R)
    with CommTrace() as trace:
        SummedInside.apply(dx, dw).pow(2).sum().backward()
    check_gradients([(dx, x), (dw, w)])
    assert not trace.phase("backward")


# -- registration -------------------------------------------------------------------------------------------------


def row_norm(x):
    return x / x.abs().sum(-1, keepdim=True)


class RowNormOp(DistributedOp):
    def infer_layout(self, cache_values):
        (x,) = cache_values
        if x.shard_order[-1]:
            raise ValueError("row_norm: the last dim must be whole")
        return (x,), None


@pytest.mark.ranks(4)
def test_a_programmatic_registration_routes_dtensors():
    op = RowNormOp("logit")  # a torch function with a rule already
    register_distributed_op("logit", op, override=True)
    assert get_distributed_op("logit") is op
    x = spread(torch.rand(4, 6), Shard(0), R)
    assert torch.logit(x).placements == (Shard(0), R)
    with pytest.raises(ValueError, match="last dim must be whole"):
        torch.logit(spread(torch.rand(4, 6), R, Shard(1)))


@pytest.mark.ranks(2)
def test_a_yaml_table_is_found_by_get_distributed_op(tmp_path):
    (tmp_path / "rule.py").write_text(
        textwrap.dedent(
            """
            from hyper_parallel import DistributedOp

            class MyOp(DistributedOp):
                def infer_layout(self, cache_values):
                    return (cache_values[0],), None
            """
        )
    )
    table = tmp_path / "mine.yaml"
    table.write_text(
        "my_scale:\n  dist_op_name: scale_op\n  distributed_op_class: MyOp\n  distributed_op_file: rule.py\n"
    )
    load_op_table(table)
    assert get_distributed_op("my_scale").op_name == "scale_op"
    assert get_distributed_op("scale_op") is get_distributed_op("my_scale")


@pytest.mark.ranks(4)
def test_unsupported_placements_raise_a_value_error_that_names_them():
    mesh = mesh2x2()
    a = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0), R])
    b = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(1), R])
    with pytest.raises(RedistributionError) as caught:
        a + b
    text = str(caught.value)
    assert "S(0), S(1)" in text
    assert "'dp'" in text
    assert "redistribute" in text
    assert "(8, 4)" in text


@pytest.mark.ranks(4)
def test_broadcasting_of_a_row_shard_with_a_column_shard():
    x, y = leaf(8, 1), leaf(1, 6, seed=1)
    (x + y).tanh().sum().backward()
    dx, dy = spread(x, Shard(0), R), spread(y, R, Shard(1))
    out = dx + dy
    assert out.placements == (Shard(0), Shard(1))
    torch.testing.assert_close(out.full_tensor(), (x + y).detach())
    out.tanh().sum().backward()
    check_gradients([(dx, x), (dy, y)])


@pytest.mark.ranks(4)
def test_a_model_with_an_own_dfunction_trains_a_step_as_on_one_device():
    register(GatedProductOp)

    def step(x, w, scale, product):
        h = F.linear(x, w)
        out, _ = product(h, scale, 0.5)
        loss = out.pow(2).mean()
        loss.backward()
        return loss

    x, w, scale = leaf(8, 4), leaf(3, 4, seed=1), leaf(3, seed=2)
    loss = step(x, w, scale, gated_product)
    dx, dw, ds = spread(x, Shard(0), R), spread(w, R, R), spread(scale, R, R)
    result = step(dx, dw, ds, GatedProduct.apply)
    assert result.item() == pytest.approx(loss.item())
    check_gradients([(dx, x), (dw, w), (ds, scale)])
    parameters, plain = [dw, ds], [w, scale]
    torch.optim.SGD(parameters, lr=0.1, foreach=False).step()
    torch.optim.SGD(plain, lr=0.1).step()
    for d, p in zip(parameters, plain, strict=True):
        torch.testing.assert_close(d.full_tensor().detach(), p.detach())


# -- custom_shard -------------------------------------------------------------------------------------------------


def rotate(x, w, *, angle=None):
    return x * w + (0 if angle is None else angle)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("x_placements", [(R, R), (Shard(0), R), (Shard(0), Shard(1))])
def test_custom_shard_without_in_layouts_sums_the_terms_of_replicated_inputs(x_placements):
    x, w = leaf(4, 6), leaf(4, 6, seed=1)
    rotate(x, w, angle=x).pow(2).sum().backward()
    sharded = custom_shard(rotate, mesh2x2(), out_layouts=list(x_placements))
    dx, dw = spread(x, *x_placements), spread(w, *x_placements)
    out = sharded(dx, dw, angle=dx)
    assert isinstance(out, DTensor)
    assert out.shape == (4, 6)
    out.pow(2).sum().backward()
    check_gradients([(dx, x), (dw, w)])


@pytest.mark.ranks(4)
def test_custom_shard_as_decorator_with_a_replicated_scale_and_uneven_rows():
    mesh = mesh2x2()

    @custom_shard(device_mesh=mesh, out_layouts=[Shard(0), R], in_layouts=([Shard(0), R], None))
    def scale(x, w):
        return torch.cat([x * w, x], dim=1)

    x, w = leaf(5, 3), leaf(3, seed=1)
    torch.cat([x * w, x], dim=1).pow(2).sum().backward()
    dx, dw = spread(x, R, R), spread(w, R, R)
    out = scale(dx, dw)
    assert out.shape == (5, 6)
    assert out.placements == (Shard(0), R)
    out.pow(2).sum().backward()
    check_gradients([(dx, x), (dw, w)])


@pytest.mark.ranks(4)
def test_custom_shard_refuses_what_it_cannot_do():
    mesh = mesh2x2()
    with pytest.raises(TypeError, match="shard_module"):
        custom_shard(nn.Linear(2, 2), mesh, out_layouts=[R, R])
    with pytest.raises(ValueError, match="out_layouts"):
        custom_shard(rotate, mesh)
    strict = custom_shard(rotate, mesh, [Shard(0), R], ([Shard(0), R], None), redistribute_inputs=False)
    x = spread(leaf(4, 6), R, R)
    with pytest.raises(RedistributionError, match="redistribute_inputs"):
        strict(x, x)
    with pytest.raises(TypeError, match="no DTensor"):
        custom_shard(rotate, mesh, [R, R], ([R, R], None))(torch.zeros(2), x)
    with pytest.raises(ValueError, match="out_layouts has 2"):
        custom_shard(lambda x: (x, x, x), mesh, ([R, R], [R, R]))(x)


@pytest.mark.ranks(4)
def test_custom_shard_takes_alias_layouts():
    layout = Layout((2, 2), ("dp", "tp"))
    sharded = custom_shard(lambda a, b: a @ b, None, layout("dp", "None", partial={"tp": "sum"}))
    a, b = leaf(4, 6), leaf(6, 2, seed=1)
    out = sharded(spread(a, Shard(0), Shard(1)), spread(b, R, Shard(0)))
    torch.testing.assert_close(out.full_tensor(), (a @ b).detach())
