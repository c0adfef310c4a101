"""What tests of core share: plugins installed on a path of their own or made in memory, registries with tables of
theirs, and a mesh of ranks that do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch.distributed as dist

from hyper_parallel import init_device_mesh
from hyper_parallel.plugins import PluginManager
from hyper_parallel.plugins.op_table import OpTable
from hyper_parallel.registry import Registry
from hyper_parallel.torch_compat import fake_store

sys.path.insert(0, str(Path(__file__).parent))  # makes rules_for_tests importable


class Site:
    """A folder like site-packages, into which plugins are installed without pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self, plugin: str, source: str = "", *, api: int | None = 1, dist: str | None = None, **files: str
    ) -> Path:
        """Install a plugin whose ``_plugin`` module has this source; ``files`` maps a file's stem to YAML text."""
        dist = dist or f"hp-{plugin}"
        package = self.folder / dist.replace("-", "_")
        package.mkdir()
        (package / "__init__.py").write_text("")
        head = "from hyper_parallel.plugins import Command, OpTable, Platform, hookimpl\n"
        head += "" if api is None else f"HYPER_PARALLEL_API = {api}\n"
        if files:
            tables = ", ".join(f"OpTable.from_package(__package__, '{stem}.yaml')" for stem in files)
            head += f"@hookimpl\ndef hyper_parallel_op_tables():\n    return [{tables}]\n"
        (package / "_plugin.py").write_text(head + textwrap.dedent(source))
        for stem, text in files.items():
            (package / f"{stem}.yaml").write_text(textwrap.dedent(text).lstrip())
        info = self.folder / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[hyper_parallel.plugins]\n{plugin} = {package.name}._plugin\n")
        return package

    def run(self, *arguments: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a fresh process that sees the installed plugins."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HYPER_PARALLEL_")}
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**kept, "PYTHONPATH": str(self.folder), "NO_COLOR": "1", **environ},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def python(self, code: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """As :meth:`run`, for code."""
        return self.run("-c", textwrap.dedent(code), check=check, **environ)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    return Site(folder)


@pytest.fixture
def make_plugin():
    """Make a plugin module in memory from its source."""

    def make(source: str, **names: object) -> types.ModuleType:
        module = types.ModuleType("plugin_made_by_a_test")
        vars(module).update(names)
        exec(f"from hyper_parallel.plugins import *\nHYPER_PARALLEL_API = 1\n{textwrap.dedent(source)}", vars(module))
        return module

    return make


@pytest.fixture
def table(tmp_path):
    """Write a table; every entry is a Rule of rules_for_tests unless it says otherwise."""

    def write(text, name="ops.yaml"):
        path = tmp_path / name
        default = "__default__: {distributed_op_class: Rule, distributed_op_module: rules_for_tests}\n"
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


@pytest.fixture(scope="module")
def mesh():
    """A mesh of 2 by 2 ranks of which this process is the first; collectives do nothing, so values are right only where
    nothing is communicated."""
    dist.init_process_group("fake", rank=0, world_size=4, store=fake_store())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()
