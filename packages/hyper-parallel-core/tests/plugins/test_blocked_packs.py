"""A pack that is installed but blocked by a setting: every hint says how to unblock it, none says pip install."""

import json

import pytest

DIST = "hyper-parallel-ops-basic"
SETTINGS = [
    ({"HYPER_PARALLEL_DISABLE_PLUGINS": "pack"}, "disabled by", "remove 'pack' from HYPER_PARALLEL_DISABLE_PLUGINS"),
    ({"HYPER_PARALLEL_DISABLE_PLUGINS": "*"}, "disabled by", "unset HYPER_PARALLEL_DISABLE_PLUGINS, whose '*' leaves"),
    ({"HYPER_PARALLEL_PLUGINS": ""}, "not listed in", "add 'pack' to HYPER_PARALLEL_PLUGINS, or unset it"),
]

ALL_HINTS = f"""
    import json, sys, types
    from importlib.metadata import EntryPoint, distribution
    from hyper_parallel.cli.coverage_command import _advice
    from hyper_parallel.cli.health_checks import _ops
    from hyper_parallel.plugins import PluginManager, use_manager
    from hyper_parallel.registry import Registry

    class Ours:
        name, version = {DIST!r}, "1.2"

    sys.modules["pack_of_a_test"] = types.ModuleType("pack_of_a_test")
    entry = EntryPoint("pack", "pack_of_a_test", "hyper_parallel.plugins")._for(Ours)
    manager = PluginManager([entry])
    one = types.SimpleNamespace(status="missing", pack={DIST!r}, where="train.py:3")
    with use_manager(manager):
        print(json.dumps({{
            "missing op": str(Registry(manager).missing_error("softmax")),
            "missing name": str(manager.missing_name_error("fully_shard", {DIST!r})),
            "doctor": [check.fix for check in _ops(manager)][0],
            "coverage": _advice(one),
        }}))
"""


@pytest.mark.parametrize(("setting", "reason", "remedy"), SETTINGS, ids=["disabled", "all disabled", "not allowed"])
def test_hints_for_a_blocked_pack_say_how_to_unblock_it(site, setting, reason, remedy):
    hints = json.loads(site.python(ALL_HINTS, **setting).stdout)
    for text in hints.values():
        assert DIST in text
        assert f"is installed but left out: {reason}" in text
        assert remedy in text
        assert "pip install" not in text


def test_list_of_plugins_says_how_to_unblock_one(site):
    site.install("acme")
    arguments = ("-m", "hyper_parallel", "plugins")
    setting = {"HYPER_PARALLEL_DISABLE_PLUGINS": "acme"}
    text = site.run(*arguments, **setting).stdout
    assert "disabled by HYPER_PARALLEL_DISABLE_PLUGINS: remove 'acme' from HYPER_PARALLEL_DISABLE_PLUGINS" in text
    found = {each["name"]: each for each in json.loads(site.run(*arguments, "--json", **setting).stdout)["plugins"]}
    assert found["acme"]["remedy"] == "remove 'acme' from HYPER_PARALLEL_DISABLE_PLUGINS"
