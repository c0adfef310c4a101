"""In-place operators, views and copies behave as on one device, or are refused; no write is lost."""

from __future__ import annotations

import collections
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    distribute_tensor,
    init_device_mesh,
    redistribute_policy,
)
from hyper_parallel.testing.placing import make

R, P = Replicate(), Partial()


def mesh4():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def spread(tensor, *placements, mesh=None):
    return distribute_tensor(tensor, mesh or mesh4(), placements, src_data_rank=None)


ADDITIONS = {
    "x + 3": lambda x: x + 3,
    "3 + x": lambda x: 3 + x,
    "function": lambda x: torch.add(x, other=3),
    "method": lambda x: x.add(other=3),
    "in place": lambda x: x.clone().add_(other=3),
    "numpy float": lambda x: x + np.float32(3),
    "numpy int": lambda x: x + np.int64(3),
    "x - -3": lambda x: x - (-3),
    "alpha": lambda x: torch.add(x, 1.5, alpha=2),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", ADDITIONS)
def test_a_number_is_added_once_to_a_pending_sum(form):
    add = ADDITIONS[form]
    x = DTensor.from_local(torch.ones(2, dtype=torch.float64), mesh4(), [P])
    assert add(x).tolist() == [7.0, 7.0]


@pytest.mark.ranks(4)
def test_true_is_added_once_to_a_pending_sum():
    x = DTensor.from_local(torch.ones(2), mesh4(), [P])
    assert (x + True).tolist() == [5.0, 5.0]


@pytest.mark.ranks(4)
def test_all_views_of_a_tensor_turn_varying_together():
    x, w = leaf(2, 3), leaf(3)

    def f(x, w):
        h = x * 1
        a, b = h[0:1], h[1:2]
        a.mul_(w)
        return b.sum() + a.sum()

    f(x, w).backward()
    dx, dw = spread(x, R), spread(w, R)
    f(dx, dw.redistribute(placements=[R], grad_placements=[P])).backward()
    torch.testing.assert_close(dx.grad.full_tensor(), x.grad)
    torch.testing.assert_close(dw.grad.full_tensor(), w.grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), R])
def test_what_torch_copies_shares_no_memory(placement):
    for copy in (lambda t: t.t().contiguous(), lambda t: t.t().reshape(-1), lambda t: t.t().flatten()):
        plain = torch.arange(12.0).view(4, 3)
        x = spread(plain, placement)
        with redistribute_policy("auto"):
            y = copy(x)
        y.add_(1)
        torch.testing.assert_close(x.full_tensor(), torch.arange(12.0).view(4, 3))
        torch.testing.assert_close(y.full_tensor(), copy(plain) + 1)


@pytest.mark.ranks(4)
def test_out_refuses_gradients_as_torch_does():
    x = spread(leaf(4), Shard(0))
    out = spread(torch.zeros(4, dtype=torch.float64), Shard(0))
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.add(x, x, out=out)
    with torch.no_grad():
        assert torch.add(x, x, out=out) is out
    torch.testing.assert_close(out.full_tensor(), 2 * x.full_tensor().detach())


@pytest.mark.ranks(4)
def test_arrays_of_numpy_are_not_mistaken_for_each_other():
    x = spread(torch.zeros(4), R)
    for n in (3, 2, 4, 1, 2):
        assert x.new_tensor(np.arange(n)).shape == (n,)


@pytest.mark.ranks(4)
def test_named_tuples_are_taken_as_tuples():
    pair = collections.namedtuple("pair", "a b")
    x = spread(torch.arange(8.0), Shard(0))
    y = spread(torch.arange(8.0), Shard(0))
    stacked = torch.stack(pair(x, y), 1)
    assert stacked.shape == (8, 2)


@pytest.mark.ranks(4)
def test_an_in_place_operator_keeps_its_target_on_its_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = spread(torch.zeros(4), R, R, mesh=mesh)
    y = spread(torch.ones(4), R, mesh=mesh["tp"])
    with pytest.raises(ValueError, match="writes its first argument"):
        x += y
    assert (x + y).full_tensor().tolist() == [1.0] * 4


@pytest.mark.ranks(4)
def test_a_write_to_the_source_of_a_redistributed_copy_is_refused_while_the_copy_lives():
    x = spread(torch.arange(25.0).view(5, 5), Shard(0))
    with redistribute_policy("auto"):
        part = x[1:4]
        with pytest.raises(RuntimeError, match="redistributed copy"):
            x[2:5] = 0
        del part
        x[2:5] = 0
    assert x.full_tensor()[2].sum() == 0


def write_parts(x, v):
    """Writes to slices and rows, some of which do not lie where their elements are."""
    y = x.clone()
    y[:4].add_(v)
    y[1:3].mul_(2)
    y.narrow(0, 4, 2).zero_()
    y[1].add_(v[0])
    y.select(0, -1).fill_(3.0)
    y.transpose(0, 1)[1:][:, 2:5].copy_(v[:2, :3])
    return y


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placements", [(Shard(0), R), (Shard(0), Shard(0)), (Shard(1), Shard(0)), (R, Shard(1))])
def test_a_write_to_a_slice_reaches_the_tensor_wherever_its_elements_are(placements):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, v = leaf(7, 3), leaf(4, 3)
    dx, dv = spread(x, *placements, mesh=mesh), spread(v, R, R, mesh=mesh)
    want, got = write_parts(x, v), write_parts(dx, dv)
    torch.testing.assert_close(got.full_tensor(), want)
    (want**2).sum().backward()
    (got**2).sum().backward()
    torch.testing.assert_close(dx.grad.full_tensor(), x.grad)
    torch.testing.assert_close(dv.grad.full_tensor(), v.grad)


ROW_WRITES = {
    "fill_": lambda row: row.fill_(7),
    "[...] =": lambda row: row.__setitem__(..., 7.0),
    "copy_": lambda row: row.copy_(row.detach() * 2),
    "through a view": lambda row: row.view(3, 1)[1:].fill_(7),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ROW_WRITES)
@pytest.mark.parametrize("placements", [(Shard(0), R), (Shard(0), Shard(0)), (R, Shard(1))], ids=str)
def test_a_write_to_a_row_shows_in_the_row_and_in_the_tensor(name, placements):
    x = leaf(5, 3)
    dx = spread(x, *placements, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    for get in (lambda y: y.select(0, 3), lambda y: y[3], lambda y: y.narrow(0, 3, 1)[0]):
        (whole, want), (base, row) = ((y, get(y)) for y in (x * 1, dx * 1))
        ROW_WRITES[name](want)
        ROW_WRITES[name](row)
        torch.testing.assert_close(row.detach().full_tensor(), want.detach())
        torch.testing.assert_close(base.detach().full_tensor(), whole.detach())


VIEWS = {  # of a tensor of (6, 4): functions that take a view to write to
    "split": lambda x: x.split(2)[1],
    "split_with_sizes": lambda x: x.split_with_sizes([1, 5])[0],
    "chunk": lambda x: x.chunk(4, 1)[2],
    "tensor_split": lambda x: x.tensor_split((2, 5))[1],
    "vsplit": lambda x: x.vsplit(3)[2],
    "unbind": lambda x: x.unbind(1)[3],
    "unbind(-2)": lambda x: x.unbind(-2)[5],
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(8, 3)[2:],
    "flatten": lambda x: x.flatten()[3],
    "unflatten": lambda x: x.unflatten(0, (3, 2))[:, 1],
    "view of one row": lambda x: x.narrow(0, 5, 1).view(2, 2),
    "squeeze": lambda x: x.narrow(1, 2, 1).squeeze(1),
    "narrow": lambda x: x.narrow(0, 1, 3),
    "select": lambda x: x.select(-1, 1),
    "[]": lambda x: x[-2, 1:3],
    "transpose": lambda x: x.transpose(0, 1)[1],
    "diagonal": lambda x: x.diagonal(),
    "diagonal(-1)": lambda x: x.diagonal(-1, 1, 0),
    "linalg.diagonal": lambda x: torch.linalg.diagonal(x.unflatten(0, (2, 3)), offset=1),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(6, 2, 2)))[..., 1],
    "chained": lambda x: x.t()[1:].flatten()[4:10].view(2, 3)[1],
}
PLACEMENTS = [(Shard(0), R), (R, Shard(1)), (Shard(0), Shard(0)), (Shard(1), Shard(0))]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_a_view_reaches_the_tensor_wherever_its_elements_are(name, placements):
    x = leaf(6, 4).detach()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with redistribute_policy("auto"):
        for write in (lambda view: view.mul_(3), lambda view: view.fill_(7), lambda view: view.copy_(view * 2)):
            want, got = x.clone(), spread(x, *placements, mesh=mesh).clone()
            with torch.no_grad():  # as PyTorch refuses writes to pieces of split and unbind otherwise
                shown, view = VIEWS[name](want), VIEWS[name](got)
                write(shown)
                write(view)
            torch.testing.assert_close(got.full_tensor(), want)
            torch.testing.assert_close(view.full_tensor(), shown)
            assert got.placements == placements


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["tensor_split", "view", "reshape", "squeeze", "diagonal", "chained"])
def test_gradients_pass_a_write_to_a_copy(name):
    plain = leaf(6, 4)
    x = spread(plain, Shard(0))
    with redistribute_policy("auto"):
        for leaves in (plain, x):
            hidden = leaves * 2
            VIEWS[name](hidden).mul_(3)
            hidden.square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), R])
def test_all_pieces_of_a_tensor_are_written_one_after_the_other(placement):
    plain = leaf(6, 4).detach()
    x, want = spread(plain, placement).clone(), plain.clone()
    for tensor in (x, want):
        for at, row in enumerate(tensor.unbind()):
            row.mul_(at)
        del row  # it would not change with the next writes
        for at, piece in enumerate(tensor.tensor_split(4)):
            piece.add_(at)
    torch.testing.assert_close(x.full_tensor(), want)


@pytest.mark.ranks(4)
def test_what_would_change_with_a_write_and_does_not_refuses_it():
    x = spread(leaf(6, 4).detach(), Shard(0)).clone()
    row, windows, wide = x[2], x.unfold(0, 2, 2), x.narrow(0, 3, 1).expand(2, 4)
    for write in (lambda: x.mul_(2), lambda: x[1].mul_(2), lambda: x.t().mul_(2)):
        with pytest.raises(RuntimeError, match="redistributed copy"):
            write()
    del row, wide
    with pytest.raises(RuntimeError, match=r"result of unfold\(\).* write would be lost"):
        windows.mul_(2)
    with pytest.raises(RuntimeError, match="would be lost"):
        windows[1].mul_(2)
    del windows
    x.mul_(2)
    torch.testing.assert_close(x.full_tensor(), 2 * leaf(6, 4).detach())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), R])
def test_pieces_of_tensor_split_are_written_while_gradients_are_on(placement):
    """PyTorch makes them one by one; it refuses writes to those of ``split``."""
    x = leaf(8, 4)
    dx = spread(x, placement)
    for base in (whole := x * 1, placed := dx * 1):
        base.tensor_split(4)[1].mul_(3)
    torch.testing.assert_close(placed.detach().full_tensor(), whole.detach())
    (whole**2).sum().backward()
    (placed**2).sum().backward()
    torch.testing.assert_close(dx.grad.full_tensor(), x.grad)
    with pytest.raises(RuntimeError, match="multiple views"):
        (dx * 1).split(2)[1].mul_(3)


@pytest.mark.ranks(4)
def test_a_row_of_a_sharded_parameter_is_written_in_place():
    weight = spread(torch.ones(5, 2), Shard(0)).requires_grad_()
    with torch.no_grad():
        weight[3].fill_(0)
        weight[1].clamp_(max=0.5)
    assert weight.full_tensor()[:, 0].tolist() == [1.0, 0.5, 1.0, 0.0, 1.0]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [8, 1])
def test_one_piece_of_a_sharded_dim_is_the_tensor(size):
    plain = torch.arange(float(size))
    x = spread(plain, Shard(0))
    for pieces in (x.split(100), x.chunk(1), x.split([size, 0])[:1], x.tensor_split(1), (x.narrow(0, 0, size),)):
        torch.testing.assert_close(pieces[0].full_tensor(), plain)


@pytest.mark.ranks(4)
def test_an_index_that_nobody_holds_is_an_error():
    table, ids = spread(torch.zeros(8, 3), Shard(0)), spread(torch.tensor([0, 8]), R)
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(ids, table)
    with pytest.raises(IndexError, match="out of range"):
        table.index_select(0, ids)


@pytest.mark.ranks(4)
def test_an_operator_of_python_with_a_plain_tensor_says_what_is_wrong():
    x, plain = spread(torch.zeros(4, 4), R), torch.zeros(4, 4)
    for mix in (lambda: x + plain, lambda: plain + x, lambda: x * plain, lambda: x > plain, lambda: x @ plain):
        with pytest.raises(RuntimeError, match="implicit_replication"):
            mix()


WRITES = {
    "clamp_": lambda x: x.clamp_(min=0.0),
    "relu_": torch.relu_,
    "*=": lambda x: x.__imul__(x.detach().clone()),
    "inplace=True": lambda x: F.silu(x, inplace=True),
    "module": torch.nn.ReLU(inplace=True),
    "by position": lambda x: F.threshold(x, 0.0, 1.0, True),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placements", [(P, R), (Shard(0), P), (P, P)], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_what_needs_the_value_of_a_pending_sum_is_written_to_the_sum(name, placements):
    """The tensor stays a pending sum: views of it, and detached forms, see the write too."""

    def run(x):
        hidden = x * 1
        view, detached = hidden.t(), hidden.detach()
        WRITES[name](hidden)
        ((hidden * hidden).sum() + view.sum()).backward()
        return hidden, view, detached

    plain = leaf(5, 3)
    placed = make(plain, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), placements, requires_grad=True)
    for got, want in zip(run(placed), run(plain), strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach())
        assert any(isinstance(p, Partial) for p in got.placements)
    torch.testing.assert_close(placed.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4)
def test_what_is_written_to_a_pending_sum_is_not_gathered_unasked():
    """On an axis that the sum is not pending over, rows that are sharded do not fit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = [leaf(*sizes).detach() for sizes in ((5, 3), (5, 6), (6, 3))]
    layouts = [P, R], [R, Shard(0)], [R, R]
    target, rows, columns = (make(v, mesh, layout) for v, layout in zip(values, layouts, strict=True))
    with pytest.raises(ValueError, match="no strategy takes"):
        target.addmm_(rows, columns)
    torch.testing.assert_close(target.full_tensor(), values[0])
    with redistribute_policy("auto"):
        target.addmm_(rows, columns)
    assert target.placements == (P, R)
    torch.testing.assert_close(target.full_tensor(), torch.addmm(*values))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("training", [True, False])
def test_modules_with_inplace_true_train_as_on_one_device(training):
    """The in-place forms save their result for the backward: nothing else may count as a write to it."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 3), torch.nn.SiLU(inplace=True)]
    plain = torch.nn.Sequential(*layers, torch.nn.Dropout(0.5, inplace=True)).double().train(training)
    placed = deepcopy(plain)
    layouts = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": R}
    for name, placement in layouts.items():
        module = placed.get_submodule(name[0])
        setattr(module, name[2:], torch.nn.Parameter(spread(getattr(module, name[2:]).detach(), placement)))
    x = leaf(5, 4).detach()
    for net, given in ((plain, x), (placed, spread(x, R))):
        torch.manual_seed(1)
        net(given).square().sum().backward()
    for got, want in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


@pytest.mark.ranks(4)
def test_inplace_true_is_a_write_like_others():
    x = spread(leaf(6, 4).detach(), Shard(0))
    pending = DTensor.from_local(torch.full((3,), -1.0), mesh4(), [P])
    before = pending.reduce_partial()  # remembered, and not what is written
    assert F.relu(pending, inplace=True) is pending
    assert (pending.tolist(), before.tolist()) == ([0.0] * 3, [-4.0] * 3)
    with redistribute_policy("auto"):
        copied = x.view(-1)
        with pytest.raises(RuntimeError, match="redistributed copy"):
            F.relu(copied, inplace=True)
        del copied
    version = x._version
    F.relu(x, True)
    assert x._version > version
    with redistribute_policy("strict"), pytest.raises(ValueError, match="no strategy takes"):
        (pending * 1).clamp_(0)


@pytest.mark.ranks(4)
def test_a_tensor_whose_maximum_is_pending_and_its_detached_form_change_together():
    x = make(torch.tensor([1.0, -2.0]), mesh4(), [Partial("max")])
    x.detach().neg_()
    assert x.tolist() == [-1.0, 2.0]
    norms = spread(leaf(4, 3).detach(), Shard(0)).norm(dim=0)
    other = norms.data
    for shared in (other, norms):
        with pytest.raises(ValueError, match="no strategy takes"):  # terms of a norm cannot be negative
            shared.neg_()
    del other, shared
    norms.neg_()
    torch.testing.assert_close(norms.full_tensor(), -leaf(4, 3).detach().norm(dim=0))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("op", ["avg", "max", "min"])
def test_a_leaf_that_asks_for_a_gradient_has_no_reduction_pending_but_sums(op):
    value = torch.tensor([1.0, -2.0])
    for ask in (torch.nn.Parameter, lambda t: t.detach().requires_grad_()):
        x = ask(make(value, mesh4(), [Partial(op)]))
        (x * x).sum().backward()
        assert x.grad.tolist() == [2.0, -4.0]


@pytest.mark.ranks(4)
def test_out_in_its_rare_forms():
    value = leaf(4, 3).detach()
    x = spread(value, Shard(0))
    assert torch.utils.data.default_collate([x, x]).shape == (2, 4, 3)  # passes out=None
    with pytest.raises(TypeError, match="out= is a DTensor and no input is one"):
        torch.add(value, value, out=x)
    assert torch.equal(torch.tensor(x).full_tensor(), value)


@pytest.mark.ranks(4)
def test_a_dtensor_has_no_memory_of_its_own():
    x = spread(leaf(4, 3).detach(), Shard(0))
    for ask in (x.untyped_storage, x.storage, x.share_memory_, lambda: torch.from_dlpack(x)):
        with pytest.raises(NotImplementedError, match=r"this rank's piece has: x\.to_local\(\)\."):
            ask()
    with SkipDTensorDispatch():
        assert x.untyped_storage().nbytes() == 24


@pytest.mark.ranks(2)
def test_transforms_of_functions_say_what_to_use_instead():
    x = spread(leaf(4, 3).detach(), Shard(0), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match=r"torch\.func's transforms do not know of layouts: torch\.autograd\.grad"):
        torch.func.grad(lambda t: (t * t).sum())(x)


@pytest.mark.ranks(2)
def test_a_diagonal_by_einsum_is_a_view_or_refuses_the_write():
    value = torch.arange(9.0).view(3, 3)
    mesh = init_device_mesh("cpu", (2,))
    whole = make(value.clone(), mesh, [Replicate()])
    torch.einsum("ii->i", whole).zero_()
    assert whole.full_tensor().diagonal().tolist() == [0, 0, 0]
    turned = make(value.clone(), mesh, [Shard(0)])
    torch.einsum("ij->ji", turned).zero_()
    assert not turned.full_tensor().any()
    cut = make(value.clone(), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="einsum"):
        torch.einsum("ii->i", cut).zero_()
    torch.testing.assert_close(cut.full_tensor(), value)
