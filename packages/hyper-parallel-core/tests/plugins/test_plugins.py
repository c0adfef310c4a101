"""Loading plugins: what is found, what is left out, and that one plugin's fault stays its own."""

import pytest

from hyper_parallel.errors import PluginError
from hyper_parallel.plugins import PluginManager

STATUS = """
    import warnings
    from hyper_parallel.plugins import default_manager
    from hyper_parallel.registry import default_registry
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        default_registry().entries()
        default_manager().public_names()
    records = {record.name: record for record in default_manager().records()}
    for warning in caught:
        print("WARNING", warning.message)
    for name in ("good", "bad"):
        if name in records:
            print(name, records[name].status, records[name].reason)
"""

GOOD_TABLE = """
    mul_by_two:
      distributed_op_class: Double
      distributed_op_module: acme.rules
"""


def test_installed_plugin_is_found(site):
    site.install("good", ops=GOOD_TABLE)
    assert "good ok" in site.python(STATUS).stdout


@pytest.mark.parametrize(
    ("source", "api", "status", "reason"),
    [
        ("raise OSError('no licence')", 1, "broken", "OSError: no licence"),
        ("import sys; sys.exit()", 1, "broken", "SystemExit"),
        ("import sys; sys.exit('no licence')", 1, "broken", "SystemExit: no licence"),
        ("raise BaseException('odd')", 1, "broken", "BaseException: odd"),
        ("@hookimpl\ndef hyper_parallel_op_tables(): raise SystemExit(3)", 1, "broken", "SystemExit: 3"),
        ("@hookimpl\ndef hyper_parallel_register_ops(registry): raise SystemExit(3)", 1, "broken", "SystemExit: 3"),
        ("@hookimpl\ndef hyper_parallel_public_names(): raise SystemExit(3)", 1, "broken", "SystemExit: 3"),
        ("import not_installed_anywhere", 1, "broken", "No module named 'not_installed_anywhere'"),
        ("", 2, "incompatible", "built for plugin API 2, this core speaks 1"),
        ("", None, "incompatible", "states no HYPER_PARALLEL_API"),
        (
            "@hookimpl\ndef hyper_parallel_register_ops(registry, mesh): pass",
            1,
            "broken",
            "Argument(s) {'mesh'} are declared in the hookimpl but can not be found in the hookspec",
        ),
        (
            "@hookimpl\ndef hyper_parallel_op_table(): return []",
            1,
            "broken",
            "unknown hook hyper_parallel_op_table; did you mean hyper_parallel_op_tables?",
        ),
        ("def hyper_parallel_op_tables(): return []", 1, "broken", "is not marked with @hookimpl"),
        ("@hookimpl(wrapper=True)\ndef hyper_parallel_op_tables(): yield", 1, "broken", "is a hook wrapper"),
        ("@hookimpl\ndef hyper_parallel_op_tables(): return 1 / 0", 1, "broken", "ZeroDivisionError"),
        ("@hookimpl\ndef hyper_parallel_register_ops(registry): registry.register('x', 3)", 1, "broken", "TypeError"),
        ("@hookimpl\ndef hyper_parallel_public_names(): return {'DTensor': 'acme'}", 1, "broken", "a name of core"),
        ("@hookimpl\ndef hyper_parallel_public_names(): return {'x': 3}", 1, "broken", "maps names to"),
    ],
)
def test_plugin_at_fault_is_left_out_with_one_warning_and_the_others_work(site, source, api, status, reason):
    site.install("good", ops=GOOD_TABLE)
    site.install("bad", source, api=api)
    output = site.python(STATUS).stdout
    assert "good ok" in output
    assert f"bad {status}" in output
    assert reason in output
    assert output.count("WARNING") == 1
    assert f"hyper-parallel plugin 'bad' (hp-bad 1.2) left out: {status}" in output
    assert "HYPER_PARALLEL_DISABLE_PLUGINS=bad" in output


def test_plugin_that_fails_half_way_leaves_no_ops_behind(site):
    site.install("bad", "@hookimpl\ndef hyper_parallel_register_ops(registry): raise OSError", ops=GOOD_TABLE)
    output = site.python(
        "from hyper_parallel.registry import default_registry; print(default_registry().entries('mul_by_two'))"
    ).stdout
    assert output.strip() == "[]"


def test_malformed_table_leaves_its_plugin_out_and_says_where(site):
    site.install("bad", ops="mul_by_two:\n  distributed_op_clas: Double\n  distributed_op_module: acme\n")
    output = site.python(STATUS).stdout
    assert "hp_bad/ops.yaml:2:3: unknown field 'distributed_op_clas'" in output
    assert "did you mean 'distributed_op_class'?" in output


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"HYPER_PARALLEL_DISABLE_PLUGINS": "other, bad"}, "disabled by HYPER_PARALLEL_DISABLE_PLUGINS"),
        ({"HYPER_PARALLEL_DISABLE_PLUGINS": "*"}, "disabled by HYPER_PARALLEL_DISABLE_PLUGINS"),
        ({"HYPER_PARALLEL_PLUGINS": "good"}, "not listed in HYPER_PARALLEL_PLUGINS"),
        ({"HYPER_PARALLEL_PLUGINS": ""}, "not listed in HYPER_PARALLEL_PLUGINS"),
    ],
)
def test_blocked_plugin_is_not_even_imported(site, environ, reason):
    site.install("good")
    site.install("bad", "raise OSError")
    assert f"bad blocked {reason}" in site.python(STATUS, **environ).stdout


def test_unknown_name_in_a_setting_is_told(site):
    site.install("good")
    output = site.python(STATUS, HYPER_PARALLEL_DISABLE_PLUGINS="godo").stdout
    assert "names plugins that are not installed: godo; installed plugins: " in output
    done = site.python(STATUS, check=False, HYPER_PARALLEL_PLUGINS="godo")
    assert "PluginError: HYPER_PARALLEL_PLUGINS names plugins that are not installed: godo" in done.stderr


def test_strict_mode_makes_a_fault_an_error_every_time(site):
    site.install("bad", "raise OSError('no licence')")
    code = """
        from hyper_parallel import PluginError
        from hyper_parallel.registry import default_registry
        for attempt in range(2):
            try:
                default_registry().entries()
            except PluginError as error:
                print(error.plugin, error)
    """
    output = site.python(code, HYPER_PARALLEL_STRICT_PLUGINS="1").stdout
    assert output.count("bad hyper-parallel plugin 'bad' (hp-bad 1.2) left out: broken: OSError: no licence") == 2


def test_two_packages_with_one_plugin_name_are_both_left_out(site):
    site.install("bad", dist="hp-one")
    site.install("bad", dist="hp-two")
    assert "several packages call their plugin 'bad': hp-one, hp-two" in site.python(STATUS).stdout


def test_importing_loads_neither_torch_nor_any_plugin(site):
    site.install("good", "print('IMPORTED')")
    code = "import sys, hyper_parallel; print('torch' in sys.modules, 'pluggy' in sys.modules)"
    assert site.python(code).stdout.strip() == "False False"


def test_fifty_plugins_are_filled_without_torch_and_without_their_rules(site):
    for number in range(50):
        table = "".join(
            f"op_{number}_{op}: {{distributed_op_class: Rule, distributed_op_module: acme}}\n" for op in range(20)
        )
        site.install(f"dummy{number}", ops=table)
    code = """
        import sys
        before = len(sys.modules)
        import hyper_parallel
        imported = len(sys.modules) - before
        from hyper_parallel.registry import default_registry
        entries = default_registry().entries()
        print(sum(entry.provider.startswith("dummy") for entry in entries), "torch" in sys.modules)
        rules = [name for name in sys.modules if name.startswith('hp_dummy') and not name.endswith('_plugin')]
        print(imported, sorted(name for name in rules if name.count('.')))
    """
    counts, imports = site.python(code).stdout.splitlines()
    assert counts == "1000 False"
    imported, rules = imports.split(maxsplit=1)
    assert int(imported) < 45, "nothing heavy, and nothing of a plugin, is imported with hyper_parallel"
    assert rules == "[]", "a rule's module is imported when its function is first called"


def test_settings_that_make_no_sense_are_errors():
    for environ, message in [
        ({"HYPER_PARALLEL_STRICT_PLUGINS": "maybe"}, "neither on nor off"),
        ({"HYPER_PARALLEL_PREFER": "add"}, "write it as op=plugin"),
    ]:
        with pytest.raises(PluginError, match=message):
            PluginManager([], environ).load()


def test_registering_a_module_without_installing_it(make_plugin):
    manager = PluginManager([], {})
    record = manager.register(make_plugin(""), "mine")
    assert (record.name, record.status, record.dist) == ("mine", "ok", None)
    with pytest.raises(PluginError, match="'mine' exists already"):
        manager.register(make_plugin(""), "mine")


def test_registering_a_faulty_module_in_strict_mode_leaves_no_trace(make_plugin):
    manager = PluginManager([], {"HYPER_PARALLEL_STRICT_PLUGINS": "1"})
    faulty = "@hookimpl\ndef hyper_parallel_sharding_plan(model, wrong): pass"
    for _ in range(2):
        with pytest.raises(PluginError, match=r"'mine' .* left out: broken"):
            manager.register(make_plugin(faulty), "mine")
    assert manager.records() == []


def test_first_result_asks_plugins_by_name_and_stops_at_an_answer(make_plugin):
    manager = PluginManager([], {})
    for name, options, answer in [("c", "", "'c'"), ("a", "", "None"), ("b", "", "'b'"), ("d", "trylast=True", "'d'")]:
        source = f"@hookimpl({options})\ndef hyper_parallel_sharding_plan(model): return {answer}"
        manager.register(make_plugin(source), name)
    asked = [record.name for record, _ in manager.implementations("hyper_parallel_sharding_plan")]
    assert asked == ["a", "b", "c", "d"]
    assert manager.first_result("hyper_parallel_sharding_plan", model=None, mesh=None) == "b"


def test_failing_first_result_is_an_error_that_names_the_plugin(make_plugin):
    manager = PluginManager([], {})
    manager.register(make_plugin("@hookimpl\ndef hyper_parallel_sharding_plan(model): raise KeyError('q')"), "bad")
    with pytest.raises(PluginError, match=r"hyper_parallel_sharding_plan of plugin 'bad'.*KeyError: 'q'"):
        manager.first_result("hyper_parallel_sharding_plan", model=None, mesh=None)


def test_plugin_that_exits_when_it_is_asked_is_an_error_that_names_it(make_plugin):
    manager = PluginManager([], {})
    manager.register(make_plugin("@hookimpl\ndef hyper_parallel_sharding_plan(model): raise SystemExit(3)"), "bad")
    with pytest.raises(PluginError, match=r"hyper_parallel_sharding_plan of plugin 'bad'.*SystemExit: 3"):
        manager.first_result("hyper_parallel_sharding_plan", model=None, mesh=None)


def test_two_plans_for_one_model_are_an_error_when_it_is_asked_for(make_plugin):
    manager = PluginManager([], {})
    for name in ("a", "b"):
        plans = {"acme.Model": "acme:plan", f"acme.{name}": "acme:own"}
        manager.register(make_plugin(f"@hookimpl\ndef hyper_parallel_model_plans(): return {plans}"), name)
    assert manager.model_plan("acme.b") == "acme:own"
    assert manager.model_plan("acme.c") is None
    with pytest.raises(PluginError, match=r"\['a', 'b'\] each give a plan for acme.Model"):
        manager.model_plan("acme.Model")


def test_the_users_interrupt_is_no_fault_of_a_plugin(make_plugin):
    manager = PluginManager([], {})
    with pytest.raises(KeyboardInterrupt), manager.isolated(manager.register(make_plugin(""), "good")):
        raise KeyboardInterrupt
    assert [record.status for record in manager.records()] == ["ok"]


def test_module_of_a_rule_or_of_a_public_name_that_exits_names_the_plugin(site):
    names = "@hookimpl\ndef hyper_parallel_public_names(): return {'gadget': 'hp_bad.exits'}"
    ops = "i0e: {distributed_op_module: hp_bad.exits, distributed_op_class: A}\n"
    ops += "i1e: {distributed_op_file: exits, distributed_op_class: A}\n"
    (site.install("bad", names, ops=ops) / "exits.py").write_text("raise SystemExit('no licence')")
    code = """
        import torch
        import hyper_parallel
        from hyper_parallel import PluginError
        from hyper_parallel.registry.registry import default_registry
        for use in (
            lambda: default_registry().entries("i0e")[0].op,
            lambda: default_registry().entries("i1e")[0].op,
            lambda: hyper_parallel.gadget,
        ):
            try:
                use()
            except PluginError as error:
                print(error.plugin, "no licence" in str(error))
    """
    assert site.python(code).stdout.splitlines() == ["bad True"] * 3


def test_platforms(make_plugin):
    manager = PluginManager([], {})
    assert manager.platform("cpu").backend == "gloo"
    assert manager.platform("npu").module == "torch_npu"
    with pytest.raises(PluginError, match="'acme' is unknown; core and the installed plugins know"):
        manager.platform("acme")
    source = "@hookimpl\ndef hyper_parallel_platforms(): return [Platform('acme', {!r})]"
    manager.register(make_plugin(source.format("accl")), "a")
    assert manager.platform("acme").backend == "accl"
    manager.register(make_plugin(source.format("other")), "b")
    with pytest.raises(PluginError, match="described differently"):
        manager.platform("acme")


def test_faults_of_every_kind_do_not_break_an_unrelated_program(site):
    rule = "{distributed_op_module: hyper_parallel._rules.families.elementwise, distributed_op_class: Elementwise}"
    site.install("good", ops=f"sinc: {rule}\n")
    site.install("bad", "raise OSError('no licence')")
    site.install("old", api=2)
    site.install("misspelt", "@hookimpl\ndef hyper_parallel_op_table(): return []")
    site.install("arguments", "@hookimpl\ndef hyper_parallel_register_ops(registry, mesh): pass")
    site.install("indentation", ops="sinc:\n distributed_op_class: A\n   distributed_op_module: b\n")
    site.install("duplicate", ops=f"sinc: {rule}\nsinc: {rule}\n")
    site.install("unusable", ops="i0e: {distributed_op_module: gone, distributed_op_class: A}\n")
    site.install("one", ops=f"i0: {rule}\n")
    site.install("two", ops="i0: {distributed_op_module: gone, distributed_op_class: A}\n")
    code = """
        import torch
        from hyper_parallel import OpConflictError, Shard, PluginError, distribute_tensor
        from hyper_parallel.analysis.fake_world import fake_mesh, fake_world
        with fake_world(2):
            x = distribute_tensor(torch.ones(4, 2), fake_mesh({"tp": 2}), [Shard(1)])
            print(x.sinc().placements)
            for name in ("i0", "i0e"):
                try:
                    getattr(torch.special, name)(x)
                except PluginError as error:
                    print(name, type(error).__name__)
    """
    done = site.python(code, HYPER_PARALLEL_DISABLE_PLUGINS="ops-basic")  # which has all of these
    assert done.stdout.splitlines() == ["(Shard(dim=1),)", "i0 OpConflictError", "i0e PluginError"]
    assert done.stderr.count("RuntimeWarning: hyper-parallel plugin") == 6
