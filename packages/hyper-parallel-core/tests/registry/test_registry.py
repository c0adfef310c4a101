"""The registry: who provides an op, what happens when several do, and when nobody does."""

import pytest
import torch
from rules_for_tests import OtherRule, Rule

from hyper_parallel.errors import MissingOpError, OpConflictError, OpTableError, PluginError
from hyper_parallel.plugins import PluginManager, use_manager
from hyper_parallel.registry import (
    Registry,
    get_distributed_op,
    load_op_table,
    register_distributed_op,
    use_registry,
)
from hyper_parallel.registry import messages as registry_messages

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
        "from hyper_parallel._rules.op import DistributedOp\nclass FileRule(DistributedOp):\n    pass\n"
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
        ("add: {distributed_op_class: Rul}", "rules_for_tests has no class 'Rul'; did you mean 'Rule'"),
        ("add: {distributed_op_class: NotAnOp}", "rules_for_tests:NotAnOp is no subclass of DistributedOp"),
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
    assert "acme   rules_for_tests:Rule" in text
    assert "acme.yaml:2" in text
    assert "basic  rules_for_tests:OtherRule" in text
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
        assert entry.source.startswith(f"{__file__}:")  # and not where its class calls DistributedOp's constructor


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
    monkeypatch.setattr(registry_messages, "PACK_OF_OP", {})
    text = registry_with(acme="log_softmax: {}").missing_message(torch.softmax)
    assert text.splitlines()[0] == "torch.softmax has no distributed rule"
    assert "docs/" in text
    assert "similar names that have a rule: log_softmax" in text


def test_missing_op_names_the_pack_that_has_it(registry_with, monkeypatch):
    monkeypatch.setitem(registry_messages.PACK_OF_OP, "cumprod", "hyper-parallel-ops-test")
    registry = registry_with()
    for function in (torch.cumprod, torch.Tensor.cumprod_):
        text = registry.missing_message(function)
        assert "hyper-parallel-ops-test has one, but is not installed in" in text
        assert "-m pip install hyper-parallel-ops-test\n" in text
        assert "-m pip install ./packages/hyper-parallel-ops-test" in text


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
    assert line == "add: acme rules_for_tests:Rule [('colour', 'blue')] override="
    other.prefer("add", "acme")
    assert "pin add=acme" in other.fingerprint_lines()
