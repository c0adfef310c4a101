"""``hyper-parallel new-plugin``: the package that it writes is a plugin whose own tests pass."""

import json
import re

import pytest

from hyper_parallel.cli import main
from hyper_parallel.cli.new_plugin_command import write_plugin

FILES = [
    ".github/workflows/tests.yml",
    ".gitignore",
    "README.md",
    "pyproject.toml",
    "src/acme_ops/__init__.py",
    "src/acme_ops/_plugin.py",
    "src/acme_ops/operators.py",
    "src/acme_ops/ops.yaml",
    "src/acme_ops/py.typed",
    "src/acme_ops/rules.py",
    "tests/test_ops.py",
]


def test_writes_a_package_and_says_what_comes_next(tmp_path, capsys):
    assert main(["new-plugin", "acme-ops", "--folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'acme-ops'} has {len(FILES)} files" in shown
    assert "python -m pip install -e .[test]" in shown
    files = {
        path.relative_to(tmp_path / "acme-ops").as_posix(): path.read_text()
        for path in (tmp_path / "acme-ops").rglob("*")
        if path.is_file()
    }
    assert sorted(files) == FILES
    for name, text in files.items():
        assert not re.search("@[a-z]+@", text), name
    assert 'acme-ops = "acme_ops._plugin"' in files["pyproject.toml"]
    assert "hyper-parallel-core>=" in files["pyproject.toml"]


def test_as_json(tmp_path, capsys):
    assert main(["new-plugin", "acme-ops", "--folder", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["files"] == FILES
    assert content["schema"] == 1


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("Acme Ops", 2, "use small letters, digits and single hyphens"),
        ("class", 2, "import class is no Python; use another word, as in class-ops"),
        ("aten", 2, "torch.ops.aten is taken"),
        ("json", 2, "import json already means another package here"),
        ("torch", 2, "import torch already means another package here"),
        ("hyper-parallel-tp", 2, "it is a package of HyperParallel"),
        ("taken", 1, "exists already"),
    ],
)
def test_wrong_name_writes_nothing(tmp_path, capsys, name, code, text):
    (tmp_path / "taken").mkdir()
    assert main(["new-plugin", name, "--folder", str(tmp_path)]) == code
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["taken"]


def test_its_own_tests_pass_and_the_program_shows_it(site, tmp_path):
    project = tmp_path / "acme-ops"
    write_plugin("acme-ops", project)
    info = site.folder / "acme_ops-0.1.0.dist-info"  # as an editable installation leaves it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ops\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[hyper_parallel.plugins]\nacme-ops = acme_ops._plugin\n")
    path = f"{site.folder}:{project / 'src'}"
    # One operator on one mesh is enough here; the nox session third_party runs a whole pack.
    done = site.run("-m", "pytest", "-q", "-c", str(project / "pyproject.toml"), str(project / "tests"),
                    "-k", "Plugin or 5x3-5-2]", PYTHONPATH=path, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
    name = "torch.ops.acme_ops.scale_rows"
    text = site.run("-m", "hyper_parallel", "ops", name, "--import", "acme_ops.operators", PYTHONPATH=path).stdout
    assert "provider  acme-ops 0.1.0" in text
    assert "S(0)    S(0)    ->  S(0)" in text


def test_the_name_of_an_installed_plugin_is_refused(site, tmp_path):
    site.install("acme")
    arguments = ("-m", "hyper_parallel", "new-plugin", "acme", "--folder", str(tmp_path))
    done = site.run(*arguments, check=False, HYPER_PARALLEL_PLUGINS="acme")
    assert done.returncode == 2
    assert not (tmp_path / "acme").exists()
    assert "an installed plugin is called so" in done.stderr


def test_its_workflow_can_say_where_core_is(tmp_path):
    write_plugin("acme-ops", tmp_path / "acme-ops")
    workflow = (tmp_path / "acme-ops" / ".github" / "workflows" / "tests.yml").read_text()
    assert "python -m pip install ${{ vars.HYPER_PARALLEL_SOURCE }} -e .[test]" in workflow


@pytest.mark.parametrize("fault", ["import torch", "raise OSError('no licence')"])
def test_contract_finds_a_plugin_at_fault(site, tmp_path, fault):
    site.install("acme", fault)
    test = tmp_path / "test_acme.py"
    test.write_text(
        "from hyper_parallel.testing import PluginContract\nclass TestIt(PluginContract):\n    plugin = 'acme'\n"
    )
    done = site.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), check=False)
    assert done.returncode == 1
    assert "it imports torch" in done.stdout if fault == "import torch" else "no licence" in done.stdout


def test_contract_says_when_the_plugin_is_not_installed(site, tmp_path):
    test = tmp_path / "test_acme.py"
    test.write_text(
        "from hyper_parallel.testing import PluginContract\nclass TestIt(PluginContract):\n    plugin = 'acme'\n"
    )
    done = site.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), check=False)
    assert "no plugin 'acme' is installed; installed are" in done.stdout
