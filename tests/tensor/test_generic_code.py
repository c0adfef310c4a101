"""Code that is written for any tensor: operators with strangers, comparisons, copies, factories by example, swaps."""

import copy
import operator
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary, WeakTensorKeyDictionary

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.testing import mesh_of


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((2,)), placements or [Shard(0)])


# -- operators with what is no tensor ----------------------------------------------------------------------------------


class Stranger:
    """Takes over where the tensor gives up."""

    def __radd__(self, other):
        return "added"

    __rpow__ = __rsub__ = __radd__

    def __eq__(self, other):
        return "equal"

    __hash__ = object.__hash__


OPERATORS = (
    "eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and_ xor lshift "
    "iadd isub imul itruediv ifloordiv ipow iand ilshift"
).split()
OTHERS = [None, "s", (1, 2), {}, object, Stranger(), ...]


def outcome(function, *args):
    try:
        result = function(*args)
    except Exception as error:
        return type(error)
    return type(result) if isinstance(result, torch.Tensor) else result


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=str)
def test_operators_with_strangers(placement):
    """As on a plain tensor, at the first call and at later ones; on either side."""
    wrong = []
    for name in OPERATORS:
        function = getattr(operator, name)
        for other in OTHERS:
            for swapped in (False, True):
                for _ in range(2):
                    x, plain = spread(torch.ones(3, 2), placement), torch.ones(3, 2)
                    values = [outcome(function, *((other, t) if swapped else (t, other))) for t in (x, plain)]
                    if values[0] is not values[1] and values != [DTensor, torch.Tensor] and values[0] != values[1]:
                        wrong.append((name, str(other), swapped, values))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.ranks(2)
def test_a_dtype_that_cannot_hold_the_result():
    """Also where the value is computed out of place and written as terms."""
    for placement in (Shard(0), Partial()):
        for function, value, other in ((operator.ipow, torch.ones(2), 1j), (operator.imul, torch.arange(2), 0.5)):
            x = spread(value, placement)
            with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
                function(x, other)
            assert torch.equal(x.full_tensor(), value)


@pytest.mark.ranks(2)
def test_membership_and_lookup_of_strangers():
    x = spread(torch.ones(3, 2))
    assert None not in [x]
    assert [None, "s", x].index("s") == 1
    assert x != "s"
    assert (x == None) is False  # noqa: E711 - what is tested


# -- torch.layout ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_layout_is_strided_to_generic_code():
    x, other = spread(torch.ones(5, 2)), spread(torch.ones(5, 2), Replicate())
    assert x.layout == torch.strided
    assert torch.strided == x.layout
    assert not x.layout != torch.strided
    assert x.layout in (torch.strided, torch.sparse_coo)
    assert x.layout not in (torch.sparse_coo, torch.sparse_csr, "strided")
    assert x.layout != other.layout
    assert {x.layout: 1, other.layout: 2}[x.layout] == 1


LIKE = [torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_factories_by_example(placement):
    """Everything that an example has is handed on, as generic code does; twice, for what is remembered."""
    for _ in range(2):
        x = spread(torch.ones(5, 3), placement)
        local = x.to_local()
        like = {"dtype": x.dtype, "device": x.device, "layout": x.layout}
        made = [f(x, **like) for f in LIKE]
        made += [torch.full_like(x, 2.0, **like), torch.randint_like(x, 5, **like)]
        made += [x.new_empty(x.size(), **like), x.new_zeros(5, 3, **like), x.new_full((5, 3), 1.0, **like)]
        made += [x.new_empty_strided(x.size(), x.stride(), **like)]
        for tensor in made:
            assert type(tensor) is DTensor
            assert (tensor.layout, tensor.shape, tensor.stride()) == (x.layout, x.shape, x.stride())
            assert (tensor.to_local().shape, tensor.to_local().stride()) == (local.shape, local.stride())
        plain = [torch.empty_like(local, **like), torch.zeros(2, **like), torch.empty_strided((2, 3), (3, 1), **like)]
        assert {type(tensor) for tensor in plain} == {torch.Tensor}
        assert all(tensor.layout is torch.strided for tensor in plain)


@pytest.mark.ranks(2)
def test_new_empty_strided():
    x = spread(torch.ones(5, 3))
    for size, stride in (((5, 3), (1, 5)), ((5, 4), (4, 1)), ((2, 3, 4), (4, 8, 1)), ((), ()), ((5, 0), (1, 1))):
        made, want = (t.new_empty_strided(size, stride, dtype=torch.float64) for t in (x, torch.ones(5, 3)))
        assert (made.shape, made.stride(), made.dtype) == (want.shape, want.stride(), want.dtype)
        assert made.fill_(1).full_tensor().stride() == want.stride()
    assert x.new_empty_strided((5, 3), (1, 5)).placements == (Shard(0),)
    for stride in ((6, 1), (0, 1)):  # with gaps, or overlapping: as asked for, and whole
        made = x.new_empty_strided((5, 3), stride)
        assert (made.stride(), made.to_local().stride(), made.placements) == (stride, stride, (Replicate(),))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn"])
def test_our_factories_take_the_layout_of_torch(name):
    make = getattr(hyper_parallel, name)
    where = {"device_mesh": mesh_of((2,)), "placements": [Shard(0)]}
    x = make(5, 3, layout=torch.strided, **where)
    assert make(5, 3, layout=x.layout, **where).layout is x.layout
    with pytest.raises(ValueError, match=r"memory is torch\.strided"):
        make(5, 3, layout=torch.sparse_coo, **where)


# -- torch.testing -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_assert_close_of_dtensors(dtype):
    for placement in (Shard(0), Shard(1), Replicate()):
        for shape in ((5, 3), (1, 2), (), (0, 3)):
            if placement == Shard(1 if len(shape) < 2 else 2) or (not shape and placement != Replicate()):
                continue
            x = spread(torch.ones(shape).to(dtype), placement)
            torch.testing.assert_close(x, x.clone())
            torch.testing.assert_close({"a": [x]}, {"a": [x.clone()]})
            torch.testing.assert_close(x, x.clone(), rtol=0, atol=0, check_stride=True)
            if x.numel():
                with pytest.raises(AssertionError, match=r"not (equal|close)"):
                    torch.testing.assert_close(x, torch.zeros_like(x))


@pytest.mark.ranks(2)
def test_assert_close_tells_what_differs():
    """The same on all ranks, wherever the element is."""
    x, y = spread(torch.arange(10.0).reshape(5, 2)), torch.arange(10.0).reshape(5, 2)
    y[4, 1] = 7
    with pytest.raises(AssertionError, match=r"1 / 10(?s:.)*difference: 2\.0 at index \(4, 1\)"):
        torch.testing.assert_close(x, spread(y))
    with pytest.raises(AssertionError, match=r"attribute 'layout'.*S\(0\).*!=.*R"):
        torch.testing.assert_close(x, x.redistribute(placements=[Replicate()]))
    torch.testing.assert_close(x, x.redistribute(placements=[Replicate()]).redistribute(x.layout))
    torch.testing.assert_close(x, torch.arange(10.0).reshape(5, 2))  # by its shape the whole
    with pytest.raises(AssertionError, match="attribute 'shape'"):
        torch.testing.assert_close(x, x[:3])
    nan = spread(torch.tensor([1.0, float("nan")]))
    torch.testing.assert_close(nan, nan.clone(), equal_nan=True)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(nan, nan.clone())


# -- .data and what sets it --------------------------------------------------------------------------------------------


def spread_linear(*placements):
    """A linear layer of size (4, 6) by hand, and its twin on one device."""
    torch.manual_seed(0)
    twin = nn.Linear(4, 6)
    layer = copy.deepcopy(twin)
    for (name, parameter), placement in zip(list(layer.named_parameters()), placements, strict=True):
        setattr(layer, name, nn.Parameter(spread(parameter.detach(), placement)))
    return layer, twin


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("given", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_data_keeps_the_layout(placement, given):
    """Uneven shards; once before and once after the parameter was used."""
    x = nn.Parameter(spread(torch.ones(5, 3), placement))
    layout = x.layout
    for factor in (2.0, 3.0):
        x.data = spread(torch.arange(15.0).reshape(5, 3) * factor, given)
        assert x.layout is layout
        assert x.to_local().shape == x.local_shape
        assert (x.requires_grad, x.is_leaf) == (True, True)
        torch.testing.assert_close(x.detach().full_tensor(), torch.arange(15.0).reshape(5, 3) * factor)
        x.grad = None
        (x * x).sum().backward()
        assert x.grad.layout is layout
        torch.testing.assert_close(x.grad.full_tensor(), 2 * x.detach().full_tensor())


@pytest.mark.ranks(2)
def test_data_that_cannot_be_laid_out_is_refused_at_the_assignment():
    x = nn.Parameter(spread(torch.ones(5, 3), Shard(1)))
    with pytest.raises(ValueError, match=r"keeps its layout.*of 2 dimensions.*of 1.*redistribute\(\)"):
        x.data = spread(torch.ones(5))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    with pytest.raises(ValueError, match=r"keeps its layout.*other=2.*redistribute\(\)"):
        x.data = distribute_tensor(torch.ones(5, 3), other, [Shard(1)])
    with pytest.raises(TypeError, match="distribute_tensor"):
        x.data = torch.ones(5, 3)
    x.data = spread(torch.zeros(5, 3), Shard(1))
    assert x.full_tensor().sum() == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("replicated", [False, True])
def test_a_vector_of_parameters(replicated):
    layer, twin = spread_linear(Shard(0), Shard(0))
    layouts = [p.layout for p in layer.parameters()]
    vector = parameters_to_vector(layer.parameters())
    torch.testing.assert_close(vector.full_tensor(), parameters_to_vector(twin.parameters()))
    if replicated:
        vector = vector.redistribute(placements=[Replicate()])
    vector_to_parameters(vector * 2, layer.parameters())
    assert [p.layout for p in layer.parameters()] == layouts
    for parameter, plain in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), plain * 2)
    with pytest.raises(RuntimeError, match="distribute_tensor"):
        vector_to_parameters(torch.ones(30), layer.parameters())


# -- swaps -------------------------------------------------------------------------------------------------------------


def parallel_block():
    return parallelize_module(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)),
        init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )


def sharded_block():
    block = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    return fully_shard(block, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [parallel_block, sharded_block])
def test_modules_that_swap_their_parameters(make):
    """As without: values, identity, layouts, attributes; before and after steps."""
    results = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = make()
        held = list(model.parameters())
        held[0].mark = "kept"
        layouts = [p.layout for p in held]
        references = [weakref.ref(p) for p in held]
        seen = []
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            optimizer = torch.optim.SGD(held, lr=0.1)
            for dtype in (torch.float64, torch.float32, torch.float64):
                model.to(dtype)
                loss = model(torch.ones(2, 4, dtype=dtype)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict({name: value * 2 for name, value in state.items()})
                seen += [loss.detach().double(), *(p.detach().full_tensor().double() for p in model.parameters())]
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert all(p is ref() for p, ref in zip(model.parameters(), references, strict=True))
        assert [p.layout for p in held] == layouts
        assert {p.dtype for p in held} == {p.to_local().dtype for p in held} == {torch.float64}
        assert held[0].mark == "kept"
        results.append(seen)
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.ranks(2)
def test_swapped_tensors():
    x, y = spread(torch.zeros(5, 3)), spread(torch.ones(4, dtype=torch.float64), Replicate())
    reference = weakref.ref(x)
    torch.utils.swap_tensors(x, y)
    assert (x.shape, x.dtype, x.placements) == ((4,), torch.float64, (Replicate(),))
    assert (y.shape, y.dtype, y.placements) == ((5, 3), torch.float32, (Shard(0),))
    assert x.full_tensor().tolist() == [1.0] * 4
    assert y.sum().item() == 0
    assert reference() is x
    w = nn.Parameter(spread(torch.ones(5, 3)))
    loss = (w * w).sum()
    torch.utils.swap_tensors(w, nn.Parameter(spread(torch.zeros(5, 3))))
    with pytest.raises(RuntimeError, match="swapped after the forward"):  # no gradient is lost without a word
        loss.backward()
    (w + 1).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), torch.ones(5, 3))


# -- copies, references, parametrizations ------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_copies(kind):
    x = kind(spread(torch.arange(15.0).reshape(5, 3)))
    x.mark = ["mine"]
    shallow, deep = copy.copy(x), copy.deepcopy(x)
    for other in (shallow, deep):
        assert isinstance(other, nn.Parameter) == isinstance(x, nn.Parameter)
        assert (other.layout, other.requires_grad, other.is_leaf) == (x.layout, x.requires_grad, x.is_leaf)
        torch.testing.assert_close(other.detach(), x.detach())
    assert shallow.mark is x.mark
    assert deep.mark is not x.mark
    with torch.no_grad():
        x.mul_(2)
    torch.testing.assert_close(shallow.detach(), x.detach())  # shares the memory, as on one device
    torch.testing.assert_close(deep.detach() * 2, x.detach())


@pytest.mark.ranks(2)
def test_weak_references():
    x = nn.Parameter(spread(torch.ones(3)))
    by_id, by_tensor = WeakIdKeyDictionary(), WeakTensorKeyDictionary()
    by_id[x], by_tensor[x] = 1, 2
    references = weakref.ref(x), TensorWeakRef(x)
    assert all(reference() is x for reference in references)
    assert (by_id[x], by_tensor[x]) == (1, 2)
    del x
    assert all(reference() is None for reference in references)
    assert (len(by_id), len(by_tensor)) == (0, 0)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)

    def right_inverse(self, weight):
        return weight.triu()


@pytest.mark.ranks(2)
def test_parametrizations():
    torch.manual_seed(0)
    plain = nn.Linear(3, 3, bias=False)
    layer = copy.deepcopy(plain)
    layer.weight = nn.Parameter(spread(plain.weight.detach(), Replicate()))
    x = torch.randn(4, 3)
    for module, value in ((layer, spread(x)), (plain, x)):
        parametrize.register_parametrization(module, "weight", Symmetric())
        module(value).square().sum().backward()
    original = layer.parametrizations.weight.original
    torch.testing.assert_close(original.grad.full_tensor(), plain.parametrizations.weight.original.grad)
    for module in (layer, plain):
        parametrize.remove_parametrizations(module, "weight")
    assert layer.weight.placements == (Replicate(),)
    torch.testing.assert_close(layer.weight.detach().full_tensor(), plain.weight.detach())
    torch.testing.assert_close(F.linear(spread(x), layer.weight).full_tensor(), plain(x))
