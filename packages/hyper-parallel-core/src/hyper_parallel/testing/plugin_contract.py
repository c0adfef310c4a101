"""What every plugin has to fulfil, as a test class.

Subclass it and name the plugin::

    class TestPlugin(PluginContract):
        plugin = "acme-ops"
"""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest

from hyper_parallel.plugins import PluginManager, PluginRecord
from hyper_parallel.plugins.environment import STRICT
from hyper_parallel.registry import Registry
from hyper_parallel.registry.op_entry import OpEntry

IMPORT_TIMEOUT = 120.0


class PluginContract:
    """Tests of one installed plugin.

    Attributes:
        plugin: name of its entry point.
    """

    plugin: ClassVar[str]

    @pytest.fixture
    def plugins(self) -> PluginManager:
        """The installed plugins, loaded afresh, faults raised."""
        return PluginManager(environ={STRICT: "1"})

    @pytest.fixture
    def record(self, plugins: PluginManager) -> PluginRecord:
        """What the manager knows about the plugin."""
        found = {record.name: record for record in plugins.records()}
        if self.plugin not in found:
            pytest.fail(
                f"no plugin {self.plugin!r} is installed; installed are {', '.join(sorted(found)) or 'none'}. After a "
                "change of the entry points in pyproject.toml the package has to be installed again",
                pytrace=False,
            )
        return found[self.plugin]

    @pytest.fixture
    def entries(self, plugins: PluginManager, record: PluginRecord) -> list[OpEntry]:
        """The plugin's ops."""
        return [entry for entry in Registry(plugins, {}).entries() if entry.provider == self.plugin]

    def test_is_in_use(self, record: PluginRecord) -> None:
        """It loads, speaks this core's API, and its hooks have the right names and arguments."""
        assert (record.status, record.reason) == ("ok", "")

    def test_imports_no_torch(self, record: PluginRecord) -> None:
        """Its entry point can be read by programs that need no torch, quickly."""
        code = f"import sys, {record.target}; sys.exit('torch' in sys.modules and 'it imports torch' or 0)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT, check=False
        )
        assert done.returncode == 0, f"import {record.target}: {done.stderr}"

    def test_every_op_can_be_made(self, entries: list[OpEntry]) -> None:
        """Its tables name classes that exist and accept their parameters."""
        for entry in entries:
            assert entry.op is not None

    def test_no_op_is_in_conflict(self, plugins: PluginManager, entries: list[OpEntry]) -> None:
        """No other installed plugin has another rule for one of its ops, unless one of them says ``override``."""
        registry = Registry(plugins, {})
        for entry in entries:
            registry.chosen(entry.name)

    def test_public_names_can_be_imported(self, plugins: PluginManager, record: PluginRecord) -> None:
        """What it adds to ``hyper_parallel`` is there."""
        for name in plugins.public_names().values():
            if self.plugin in name.targets:
                assert name.load() is not None
