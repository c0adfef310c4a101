"""The package as a plugin."""

from hyper_parallel.testing import PluginContract


class TestPlugin(PluginContract):
    plugin = "ops-qwen"
