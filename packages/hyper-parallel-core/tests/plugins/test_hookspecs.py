"""The reference of the hooks is right: every example in it is a plugin that works."""

import inspect
import textwrap
import types

import pytest

from hyper_parallel.plugins import OpTable, PluginManager, hookspecs

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


class Recorder:
    """Stands for the registry."""

    def __init__(self):
        self.names = []

    def register(self, name, op, *, override=()):
        self.names.append(name)


# Arguments for the examples that have some, and what each example has to answer.
ARGUMENTS = {
    "hyper_parallel_register_ops": {"registry": Recorder()},
    "hyper_parallel_sharding_plan": {"model": object(), "mesh": None},
}
ANSWERS = {
    "hyper_parallel_op_tables": lambda answer: [type(table) for table in answer] == [OpTable],
    "hyper_parallel_register_ops": lambda answer: (
        ARGUMENTS["hyper_parallel_register_ops"]["registry"].names == ["torch.ops.acme.swiglu"]
    ),
    "hyper_parallel_public_names": lambda answer: answer["AcmePlan"] == "acme_ops.plans:Plan",
    "hyper_parallel_sharding_plan": lambda answer: answer is None,
    "hyper_parallel_model_plans": lambda answer: answer["acme.modeling.AcmeForCausalLM"] == "acme_ops.plans:acme_plan",
    "hyper_parallel_cli_commands": lambda answer: [command.name for command in answer] == ["acme-check"],
    "hyper_parallel_platforms": lambda answer: [platform.device_type for platform in answer] == ["acme"],
}


@pytest.mark.parametrize("hook", HOOKS)
def test_example_runs(hook):
    _, _, example = inspect.getdoc(getattr(hookspecs, hook)).partition("Example::\n")
    module = types.ModuleType(f"example_of_{hook}")
    module.__package__ = "hyper_parallel"
    exec(textwrap.dedent(example), vars(module))
    manager = PluginManager([], {"HYPER_PARALLEL_STRICT_PLUGINS": "1"})
    manager.register(module, "example")
    ((_, answer),) = manager.collect(hook, **ARGUMENTS.get(hook, {}))
    assert ANSWERS[hook](answer)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_argument_is_documented(hook):
    specification = getattr(hookspecs, hook)
    for argument in inspect.signature(specification).parameters:
        assert f"    {argument}: " in inspect.getdoc(specification)
