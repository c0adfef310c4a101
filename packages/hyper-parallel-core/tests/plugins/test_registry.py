"""The registry: which function an op name means, who provides it, and what happens when several do."""

import operator
import sys
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import function_names
from hyper_parallel import registry as registry_module
from hyper_parallel.errors import MissingOpError, OpConflictError, OpTableError, PluginError
from hyper_parallel.op import DistributedOp
from hyper_parallel.op_table import OpTable
from hyper_parallel.plugins import PluginManager, use_manager
from hyper_parallel.registry import (
    Registry,
    get_distributed_op,
    load_op_table,
    register_distributed_op,
    use_registry,
)


class Rule(DistributedOp):
    """An op for tests; two of them differ by their colour."""

    def __init__(self, op_name, colour="grey"):
        self.colour = colour
        super().__init__(op_name)


class OtherRule(Rule):
    pass


@pytest.fixture(autouse=True)
def _rules_module(monkeypatch):
    module = types.ModuleType("rules_of_a_test")
    module.Rule, module.OtherRule, module.NotAnOp = Rule, OtherRule, int
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def table(tmp_path):
    """Write a table; every entry is a Rule of the test's module unless it says otherwise."""

    def write(text, name="ops.yaml"):
        path = tmp_path / name
        default = "__default__: {distributed_op_class: Rule, distributed_op_module: rules_of_a_test}\n"
        path.write_text(default + textwrap.dedent(text).lstrip("\n"))
        return path

    return write


@pytest.fixture
def registry_with(table, make_plugin):
    """A registry whose plugins have these tables: ``registry_with(acme="add: {}")``."""

    def make(environ=None, **tables):
        manager = PluginManager([], environ or {})
        for plugin, text in tables.items():
            path = table(text, f"{plugin}.yaml")
            source = "@hookimpl\ndef hyper_parallel_op_tables(): return [OpTable.from_path(path)]"
            manager.register(make_plugin(source, path=path, OpTable=OpTable), plugin)
        return Registry(manager, environ or {})

    return make


# ---------------------------------------------------------------------- which functions a name means


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


# ---------------------------------------------------------------------- names and objects


def test_op_is_made_on_first_use_with_its_parameters_and_once(registry_with):
    registry = registry_with(acme="add: {params: {colour: red}, dist_op_name: acme_add}")
    (entry,) = registry.entries("add")
    assert entry.instance is None
    op = registry.get("add")
    assert (op.op_name, op.colour) == ("acme_add", "red")
    assert registry.get("add") is op is registry.find(torch.add) is registry.get("acme_add")


def test_automatic_form_is_found_by_name_too(registry_with):
    registry = registry_with(acme="add: {}")
    assert registry.get("add_") is registry.get("__iadd__") is registry.get("add")
    assert registry.get("sub") is None


def test_name_of_no_torch_function_is_found_by_name(registry_with):
    registry = registry_with(acme="my_fused_op: {}")
    assert registry.get("my_fused_op").op_name == "my_fused_op"


def test_class_in_a_file_beside_the_table(registry_with, tmp_path, table):
    (tmp_path / "rules.py").write_text(
        "from hyper_parallel.op import DistributedOp\nclass FileRule(DistributedOp):\n    pass\n"
    )
    registry = registry_with()
    registry.load_table(
        table("add: {distributed_op_class: FileRule, distributed_op_file: rules}\nsub: {distributed_op_file: rules}")
    )
    assert type(registry.get("add")).__name__ == "FileRule"
    with pytest.raises(PluginError, match=r"has no class 'Rule'; did you mean 'FileRule'"):
        registry.get("sub")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add: {distributed_op_class: Rul}", "rules_of_a_test has no class 'Rul'; did you mean 'Rule'"),
        ("add: {distributed_op_class: NotAnOp}", "rules_of_a_test:NotAnOp is no subclass of DistributedOp"),
        ("add: {distributed_op_module: no_such_module}", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("add: {distributed_op_file: no_such_file}", "no_such_file.py cannot be imported: FileNotFoundError"),
        ("add: {params: {size: 3}}", "Rule cannot be made: TypeError.*unexpected keyword argument 'size'"),
    ],
)
def test_class_that_cannot_be_used_is_told_when_the_op_is_used_with_the_line(registry_with, text, message):
    registry = registry_with(acme=text + "\nmul: {}")
    assert registry.find(torch.mul) is not None
    with pytest.raises(PluginError, match=rf"op 'add' of plugin 'acme' \(.*acme.yaml:2\): .*{message}"):
        registry.find(torch.add)


# ---------------------------------------------------------------------- several providers


def test_two_plugins_with_different_classes_are_an_error_when_that_op_is_used(registry_with):
    registry = registry_with(acme="add: {}\nmul: {}", basic="add: {distributed_op_class: OtherRule}")
    assert registry.find(torch.mul) is not None
    with pytest.raises(OpConflictError) as caught:
        registry.find(torch.add)
    text = str(caught.value)
    assert "acme   rules_of_a_test:Rule" in text
    assert "acme.yaml:2" in text
    assert "basic  rules_of_a_test:OtherRule" in text
    assert "basic.yaml:2" in text
    assert "HYPER_PARALLEL_PREFER=add=acme" in text
    assert "HYPER_PARALLEL_DISABLE_PLUGINS=basic" in text
    assert [entry.provider for entry in caught.value.entries] == ["acme", "basic"]


def test_two_plugins_with_different_parameters_are_a_conflict(registry_with):
    with pytest.raises(OpConflictError):
        registry_with(acme="add: {params: {colour: red}}", basic="add: {}").find(torch.add)


def test_two_plugins_with_the_same_implementation_are_no_conflict(registry_with):
    assert registry_with(acme="add: {params: {colour: red}}", basic="add: {params: {colour: red}}").find(torch.add)


@pytest.mark.parametrize("override", ["true", "[basic]"])
@pytest.mark.parametrize("plugin", ["acme", "zeta"])
def test_declared_override_wins_whatever_the_order(registry_with, override, plugin):
    tables = {plugin: f"add: {{distributed_op_class: OtherRule, override: {override}}}", "basic": "add: {}"}
    assert isinstance(registry_with(**tables).find(torch.add), OtherRule)


def test_override_of_somebody_else_does_not_help(registry_with):
    with pytest.raises(OpConflictError):
        registry_with(acme="add: {distributed_op_class: OtherRule, override: [other]}", basic="add: {}").find(torch.add)


def test_overriding_each_other_is_a_conflict(registry_with):
    with pytest.raises(OpConflictError):
        registry_with(a="add: {override: true}", b="add: {distributed_op_class: OtherRule, override: true}").get("add")


def test_pin_in_the_environment_and_in_code_decides(registry_with):
    tables = {"acme": "add: {}", "basic": "add: {distributed_op_class: OtherRule, override: true}"}
    pinned = registry_with({"HYPER_PARALLEL_PREFER": "add=acme"}, **tables)
    assert type(pinned.find(torch.add)) is Rule
    before = pinned.generation
    pinned.prefer("add", "basic")
    assert pinned.generation > before
    assert type(pinned.find(torch.add)) is OtherRule
    pinned.prefer("add", "nobody")
    with pytest.raises(PluginError, match="pinned to 'nobody', which does not provide it"):
        pinned.find(torch.add)


def test_two_names_for_one_function_conflict_like_one_name(registry_with):
    registry = registry_with(a="torch.add: {}", b="torch._C._VariableFunctions.add: {distributed_op_class: OtherRule}")
    with pytest.raises(OpConflictError, match=r"op 'torch.add' has 2 implementations"):
        registry.find(torch.add)


# ---------------------------------------------------------------------- what the user registers


def test_registering_a_free_name_routes_the_function(registry_with):
    with use_registry(registry_with()) as registry:
        op = Rule("cumsum")
        before = registry.generation
        register_distributed_op("cumsum", op)
        assert registry.generation > before
        assert registry.find(torch.cumsum) is op is get_distributed_op("cumsum")


def test_registering_a_taken_name_names_the_provider(registry_with):
    with use_registry(registry_with(acme="add: {}")) as registry:
        op = OtherRule("unrelated")
        with pytest.raises(
            OpConflictError, match=r"(?s)'add' is already registered:\n  acme .*acme.yaml:2\n.*override=True"
        ):
            register_distributed_op("add", op)
        register_distributed_op("add", op, override=True)
        assert registry.find(torch.add) is op
        newer = OtherRule("unrelated")
        register_distributed_op("add", newer, override=True)
        assert registry.find(torch.add) is newer


def test_users_bare_name_beats_a_plugins_dotted_name(registry_with):
    with use_registry(registry_with(acme="torch.add: {}")) as registry:
        op = OtherRule("add")
        register_distributed_op("add", op, override=True)
        assert registry.find(torch.add) is op


def test_registering_something_else_is_a_type_error(registry_with):
    with use_registry(registry_with()), pytest.raises(TypeError, match="takes a DistributedOp instance"):
        register_distributed_op("add", Rule)


def test_constructing_registers(registry_with):
    with use_registry(registry_with()) as registry:
        op = Rule("cumsum")
        assert registry.get("cumsum") is op
        (entry,) = registry.entries("cumsum")
        assert entry.provider == "user"
        assert entry.source.startswith(f"{__file__}:")


def test_constructing_again_replaces_as_notebooks_need(registry_with):
    with use_registry(registry_with()) as registry:
        Rule("cumsum")
        newer = Rule("cumsum", "red")
        assert registry.get("cumsum") is newer


def test_constructing_never_replaces_somebody_elses_op(registry_with):
    with use_registry(registry_with(acme="add: {}")) as registry:
        OtherRule("add")
        with pytest.raises(OpConflictError, match="user"):
            registry.get("add")


def test_constructing_what_a_plugin_provides_anyway_is_no_conflict(registry_with):
    with use_registry(registry_with(acme="add: {params: {colour: red}}")) as registry:
        Rule("add", "red")
        assert registry.get("add").colour == "red"


def test_users_table_beats_plugins_and_can_be_loaded_again(registry_with, table):
    with use_registry(registry_with(acme="add: {}")) as registry:
        path = table("add: {distributed_op_class: OtherRule}")
        load_op_table(path)
        assert type(registry.find(torch.add)) is OtherRule
        table("add: {distributed_op_class: OtherRule, params: {colour: red}}")
        load_op_table(path)
        assert registry.find(torch.add).colour == "red"


def test_malformed_users_table_is_an_error_and_changes_nothing(registry_with, table):
    with use_registry(registry_with()) as registry:
        with pytest.raises(OpTableError, match=r"ops.yaml:3:7: unknown field 'parms'"):
            load_op_table(table("add: {}\nsub: {parms: {}}"))
        assert registry.entries() == []


def test_folder_of_users_tables(registry_with, table, tmp_path):
    table("add: {distributed_op_class: OtherRule}", "one.yaml")
    table("my_op: {}", "two.yml")
    (tmp_path / "README.md").write_text("not a table")
    registry = registry_with({"HYPER_PARALLEL_OPS_YAML_DIR": str(tmp_path)})
    assert sorted(entry.name for entry in registry.entries()) == ["add", "my_op"]
    assert type(registry.find(torch.add)) is OtherRule
    with pytest.raises(PluginError, match="HYPER_PARALLEL_OPS_YAML_DIR=/no/such/folder is not a folder"):
        registry_with({"HYPER_PARALLEL_OPS_YAML_DIR": "/no/such/folder"}).entries()


# ---------------------------------------------------------------------- registration from a plugin's code


def test_hook_registers_objects_and_factories_under_the_plugins_name(make_plugin):
    source = """
        @hookimpl
        def hyper_parallel_register_ops(registry):
            registry.register("cumsum", Rule("cumsum"))
            registry.register("my_op", lambda: Rule("my_op", "red"), override=["other"])
    """
    manager = PluginManager([], {})
    manager.register(make_plugin(source, Rule=Rule), "acme")
    with use_manager(manager), use_registry(Registry(manager, {})) as registry:
        assert [(entry.name, entry.provider) for entry in registry.entries()] == [("cumsum", "acme"), ("my_op", "acme")]
        assert registry.entries("my_op")[0].override == {"other"}
        assert registry.find(torch.cumsum).op_name == "cumsum"
        assert registry.get("my_op").colour == "red"


def test_factory_that_makes_something_else_is_told_on_use(make_plugin):
    source = "@hookimpl\ndef hyper_parallel_register_ops(registry): registry.register('my_op', lambda: 3)"
    manager = PluginManager([], {})
    manager.register(make_plugin(source), "acme")
    with pytest.raises(PluginError, match=r"op 'my_op' of plugin 'acme'.* made 3, which is no DistributedOp"):
        Registry(manager, {}).get("my_op")


# ---------------------------------------------------------------------- missing ops, fingerprint


def test_missing_op_names_the_function_and_the_tutorial(registry_with, monkeypatch):
    monkeypatch.setattr(registry_module, "PACK_OF_OP", {})
    text = registry_with(acme="log_softmax: {}").missing_message(torch.softmax)
    assert text.splitlines()[0] == "torch.softmax has no distributed rule"
    assert "docs/" in text
    assert "similar names that have a rule: log_softmax" in text


def test_missing_op_names_the_pack_that_has_it(registry_with, monkeypatch):
    monkeypatch.setitem(registry_module.PACK_OF_OP, "cumprod", "hyper-parallel-ops-test")
    registry = registry_with()
    for function in (torch.cumprod, torch.Tensor.cumprod_):
        assert "-m pip install hyper-parallel-ops-test" in registry.missing_message(function)


def test_missing_op_mentions_plugins_that_are_left_out(registry_with, make_plugin):
    manager = PluginManager([], {})
    with pytest.warns(RuntimeWarning, match="left out"):
        manager.register(make_plugin("HYPER_PARALLEL_API = 9"), "old")
    assert "these plugins are left out: old (incompatible)" in Registry(manager, {}).missing_message(torch.add)


def test_asking_for_a_name_that_nobody_has_is_an_error(registry_with):
    with use_registry(registry_with(acme="cumsum: {}")), pytest.raises(MissingOpError, match="cumsun has no") as caught:
        get_distributed_op("cumsun")
    assert caught.value.op_name == "cumsun"


def test_fingerprint_tells_what_differs(registry_with):
    same = [registry_with(acme="add: {params: {colour: red}}") for _ in range(2)]
    assert same[0].fingerprint() == same[1].fingerprint()
    same[1].find(torch.add)
    assert same[0].fingerprint() == same[1].fingerprint(), "using an op is no difference"
    other = registry_with(acme="add: {params: {colour: blue}}")
    assert other.fingerprint() != same[0].fingerprint()
    (line,) = set(other.fingerprint_lines()) - set(same[0].fingerprint_lines())
    assert line == "add: acme rules_of_a_test:Rule [('colour', 'blue')] override="
    other.prefer("add", "acme")
    assert "pin add=acme" in other.fingerprint_lines()
