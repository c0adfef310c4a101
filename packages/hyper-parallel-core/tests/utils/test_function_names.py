"""Which functions an op name means."""

import operator
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.utils import function_names


class Seen(torch.Tensor):
    """Remembers the functions that arrive."""

    functions: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Seen.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def arriving(call):
    """The first function that arrives when ``call`` gets a float, an int and a bool matrix."""
    tensors = [torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.bool)]
    Seen.functions = []
    call(*(tensor.as_subclass(Seen) for tensor in tensors))
    return Seen.functions[0]


CALLS = {
    "add": [
        lambda a, i, m: a + a,
        lambda a, i, m: a + 1,
        lambda a, i, m: 1 + a,
        lambda a, i, m: torch.add(a, a),
        lambda a, i, m: torch.add(a, a, out=torch.empty(2, 2)),
        lambda a, i, m: a.add(a),
        lambda a, i, m: a.add_(a),
        lambda a, i, m: operator.iadd(a, a),
        lambda a, i, m: torch.Tensor.__radd__(a, a),
        lambda a, i, m: torch.ops.aten.add(a, a),
        lambda a, i, m: torch.ops.aten.add.Tensor(a, a),
    ],
    "sub": [lambda a, i, m: a - a, lambda a, i, m: operator.isub(a, a)],
    "rsub": [lambda a, i, m: 1 - a, lambda a, i, m: torch.rsub(a, a)],
    "mul": [lambda a, i, m: a * a, lambda a, i, m: 2 * a, lambda a, i, m: operator.imul(a, 2)],
    "div": [
        lambda a, i, m: a / a,
        lambda a, i, m: operator.itruediv(a, 2),
        lambda a, i, m: torch.div(a, a, rounding_mode="floor"),
    ],
    "floor_divide": [lambda a, i, m: a // a, lambda a, i, m: operator.ifloordiv(a, 2)],
    "remainder": [lambda a, i, m: a % a, lambda a, i, m: operator.imod(a, 2)],
    "pow": [lambda a, i, m: a**a, lambda a, i, m: operator.ipow(a, 2), lambda a, i, m: torch.pow(2, a)],
    "matmul": [lambda a, i, m: a @ a, lambda a, i, m: operator.imatmul(a, a), lambda a, i, m: torch.matmul(a, a)],
    "neg": [lambda a, i, m: -a],
    "positive": [lambda a, i, m: +a],
    "abs": [lambda a, i, m: abs(a)],
    "bitwise_not": [lambda a, i, m: ~i],
    "bitwise_and": [lambda a, i, m: i & i, lambda a, i, m: 1 & i, lambda a, i, m: operator.iand(i, 1)],
    "bitwise_or": [lambda a, i, m: i | i, lambda a, i, m: 1 | i, lambda a, i, m: operator.ior(i, 1)],
    "bitwise_xor": [lambda a, i, m: i ^ i, lambda a, i, m: 1 ^ i, lambda a, i, m: operator.ixor(i, 1)],
    "bitwise_left_shift": [lambda a, i, m: i << 1, lambda a, i, m: operator.ilshift(i, 1)],
    "bitwise_right_shift": [lambda a, i, m: i >> 1, lambda a, i, m: operator.irshift(i, 1)],
    "eq": [lambda a, i, m: a == a, lambda a, i, m: torch.eq(a, a)],
    "ne": [lambda a, i, m: a != a],
    "lt": [lambda a, i, m: a < a, lambda a, i, m: 1 > a],
    "le": [lambda a, i, m: a <= a],
    "gt": [lambda a, i, m: a > a, lambda a, i, m: 1 < a],
    "ge": [lambda a, i, m: a >= a],
    "getitem": [lambda a, i, m: a[0]],
    "setitem": [lambda a, i, m: operator.setitem(a, 0, 1.0)],
    "relu": [lambda a, i, m: F.relu(a), lambda a, i, m: torch.relu(a), lambda a, i, m: a.relu_()],
    "gelu": [lambda a, i, m: F.gelu(a)],
    "linear": [lambda a, i, m: F.linear(a, a)],
    "logsigmoid": [lambda a, i, m: F.logsigmoid(a)],
    "softmax": [lambda a, i, m: F.softmax(a, -1), lambda a, i, m: torch.softmax(a, -1), lambda a, i, m: a.softmax(-1)],
    "scaled_dot_product_attention": [lambda a, i, m: F.scaled_dot_product_attention(a, a, a)],
    "embedding": [lambda a, i, m: F.embedding(i, a)],
    "cross_entropy": [lambda a, i, m: F.cross_entropy(a, torch.tensor([0, 1]))],
    "expm1": [lambda a, i, m: torch.special.expm1(a), lambda a, i, m: a.expm1()],
    "expit": [lambda a, i, m: torch.special.expit(a)],
    "vector_norm": [lambda a, i, m: torch.linalg.vector_norm(a)],
    "norm": [lambda a, i, m: torch.norm(a), lambda a, i, m: a.norm()],
    "fft": [lambda a, i, m: torch.fft.fft(a)],
    "split": [lambda a, i, m: torch.split(a, 1), lambda a, i, m: a.split(1)],
    "where": [lambda a, i, m: torch.where(m, a, a), lambda a, i, m: a.where(m, a)],
    "T": [lambda a, i, m: a.T],
    "mT": [lambda a, i, m: a.mT],
    "_foreach_add": [lambda a, i, m: torch._foreach_add([a], 1), lambda a, i, m: torch._foreach_add_([a], 1)],
    "new_zeros": [lambda a, i, m: a.new_zeros(2)],
    "zeros_like": [lambda a, i, m: torch.zeros_like(a)],
    "item": [lambda a, i, m: torch.ones(()).as_subclass(Seen).item()],
    "__rdiv__": [lambda a, i, m: 1 / a],
    "__rpow__": [lambda a, i, m: 2**a],
    "__float__": [lambda a, i, m: float(torch.ones(()).as_subclass(Seen))],
    "__bool__": [lambda a, i, m: bool(torch.ones(()).as_subclass(Seen))],
    "__len__": [lambda a, i, m: len(a)],
}


@pytest.mark.parametrize(("name", "call"), [(name, call) for name, calls in CALLS.items() for call in calls])
def test_bare_name_covers_every_form_of_a_call(registry_with, name, call):
    registry = registry_with(acme=f"{name}: {{}}")
    function = arriving(call)
    found = registry.find(function)
    assert found is not None, function_names.display_name(function)
    assert found.op_name == name


def test_out_form_is_the_same_function():
    with_out = arriving(lambda a, i, m: torch.add(a, a, out=torch.empty(2, 2)))
    assert with_out is arriving(lambda a, i, m: torch.add(a, a))


@pytest.mark.parametrize(
    ("name", "call", "why"),
    [
        ("div", lambda a, i, m: 1 / a, "the divisor would be taken for the dividend"),
        ("pow", lambda a, i, m: 2**a, "the exponent would be taken for the base"),
        ("embedding", lambda a, i, m: torch.embedding(a, i), "it has the arguments the other way round"),
        ("unfold", lambda a, i, m: a.unfold(0, 1, 1), "another operation than F.unfold"),
        ("diagonal", lambda a, i, m: torch.linalg.diagonal(a), "it has other defaults than torch.diagonal"),
        ("eq", lambda a, i, m: a.equal(a), "another function"),
    ],
)
def test_bare_name_does_not_cover_a_namesake_that_means_something_else(registry_with, name, call, why):
    assert registry_with(acme=f"{name}: {{}}").find(arriving(call)) is None, why


def test_dotted_name_means_exactly_one_function(registry_with):
    registry = registry_with(acme="torch.add: {}\nTensor.T: {}\ntorch.ops.aten.mul: {}\ntorch.Tensor.data.__set__: {}")
    assert registry.find(torch.add).op_name == "torch.add"
    assert registry.find(torch.Tensor.add) is None
    assert registry.find(torch.Tensor.T.__get__).op_name == "Tensor.T"
    assert registry.find(torch.Tensor.mT.__get__) is None
    assert registry.find(torch.ops.aten.mul.Tensor).op_name == "torch.ops.aten.mul"
    assert registry.find(torch.mul) is None
    assert registry.find(torch.Tensor.data.__set__).op_name == "torch.Tensor.data.__set__"


def test_most_direct_name_wins(registry_with):
    registry = registry_with(acme="add: {}\nadd_: {}\ntorch.add: {}")
    assert registry.find(torch.Tensor.add).op_name == "add"
    assert registry.find(torch.Tensor.add_).op_name == "add_"
    assert registry.find(torch.add).op_name == "torch.add"


def test_absent_module_is_no_error_and_is_found_once_it_is_imported(registry_with, monkeypatch):
    registry = registry_with(acme="torch_of_a_test.rms_norm: {}")
    assert registry.find(torch.add) is None
    module = types.ModuleType("torch_of_a_test")
    module.rms_norm = lambda x: x
    assert registry.find(module.rms_norm) is None
    monkeypatch.setitem(sys.modules, "torch_of_a_test", module)
    assert registry.find(module.rms_norm).op_name == "torch_of_a_test.rms_norm"


def test_custom_op_is_found_by_packet_and_by_overload(registry_with):
    registry = registry_with(acme="torch.ops.hp_test_registry.twice: {}")
    assert registry.find(torch.add) is None

    @torch.library.custom_op("hp_test_registry::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    name = "torch.ops.hp_test_registry.twice"
    assert registry.find(torch.ops.hp_test_registry.twice).op_name == name
    assert registry.find(torch.ops.hp_test_registry.twice.default).op_name == name
    assert registry.find(arriving(lambda a, i, m: twice(a))).op_name == name


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda a, i, m: F.linear(a, a), "torch.nn.functional.linear"),
        (lambda a, i, m: F.relu(a), "torch.nn.functional.relu"),
        (lambda a, i, m: a + a, "torch.Tensor.add"),
        (lambda a, i, m: 1 / a, "torch.Tensor.__rdiv__"),
        (lambda a, i, m: a[0], "torch.Tensor.__getitem__"),
        (lambda a, i, m: torch.add(a, a), "torch.add"),
        (lambda a, i, m: torch.split(a, 1), "torch.split"),
        (lambda a, i, m: a.split(1), "torch.Tensor.split"),
        (lambda a, i, m: a.T, "torch.Tensor.T.__get__"),
        (lambda a, i, m: torch.special.expit(a), "torch.special.expit"),
        (lambda a, i, m: torch.linalg.vector_norm(a), "torch.linalg.vector_norm"),
        (lambda a, i, m: torch.fft.fft(a), "torch.fft.fft"),
        (lambda a, i, m: torch.ops.aten.add(a, a), "torch.ops.aten.add"),
        (lambda a, i, m: torch.ops.aten.add.Tensor(a, a), "torch.ops.aten.add.Tensor"),
    ],
)
def test_function_is_shown_under_the_name_that_its_user_knows(call, name):
    assert function_names.display_name(arriving(call)) == name
