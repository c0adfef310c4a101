"""The reference of the hooks is right: every example in it is a plugin that works."""

import inspect
import textwrap
import types

import pytest

from hyper_parallel.plugins import PluginManager, hookspecs

HOOKS = [name for name in vars(hookspecs) if name.startswith("hyper_parallel_")]


@pytest.mark.parametrize("hook", HOOKS)
def test_example_is_a_plugin_that_implements_the_hook(hook):
    text = inspect.getdoc(getattr(hookspecs, hook))
    _, found, example = text.partition("Example::\n")
    assert found
    module = types.ModuleType(f"example_of_{hook}")
    exec(textwrap.dedent(example), vars(module))
    manager = PluginManager([], {})
    record = manager.register(module, "example")
    assert (record.status, record.reason) == ("ok", "")
    assert [record.name for record, _ in manager.implementations(hook)] == ["example"]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_argument_is_documented(hook):
    specification = getattr(hookspecs, hook)
    for argument in inspect.signature(specification).parameters:
        assert f"    {argument}: " in inspect.getdoc(specification)
