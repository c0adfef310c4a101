"""What must agree between the packages of this repository."""

import ast
import re
from pathlib import Path

import pytest
import torch

import hyper_parallel.registry.pack_hints
from hyper_parallel import DTensor
from hyper_parallel.plugins.op_table import OpTable

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]


def one(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return found


def test_all_packages_have_one_version_and_pin_each_other_to_it():
    versions = {one(r'^version = "([^"]+)"$', path.read_text()) for path in PROJECTS}
    (version,) = versions
    major, minor, _ = version.split(".")
    compatible = f">={version},<{major}.{int(minor) + 1}"
    requirement = re.compile(r'"hyper-parallel-[a-z-]+(?:\[[a-z,]+\])?([=<>~][^"]+)"')
    pins = {pin for path in PROJECTS for pin in requirement.findall(path.read_text())}
    assert pins == {f"=={version}", compatible}


@pytest.mark.parametrize("package", ["fsdp", "tp"])
def test_a_package_brings_the_rules_that_training_with_it_needs(package):
    project = (ROOT / f"packages/hyper-parallel-{package}/pyproject.toml").read_text()
    assert '"hyper-parallel-ops-basic>=' in one(r"^dependencies = \[(.*?)^\]", project)
    assert re.search(rf'fromkeys\(\(.*"{package}".*\), \("core", "ops-basic"\)\)', (ROOT / "noxfile.py").read_text())


def test_every_package_has_the_same_licence_file():
    licences = [path.with_name("LICENSE").read_text() for path in PROJECTS]
    assert len(set(licences)) == 1


def test_extra_all_names_every_other_extra_that_installs_anywhere():
    text = (ROOT / "pyproject.toml").read_text()
    section = one(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text)
    extras = set(re.findall(r"^([a-z]+) = ", section, re.MULTILINE)) - {"all"}
    named = set(one(r"hyper-parallel\[([a-z,]+)\]", text).split(","))
    assert extras - named == {"npu"}


def test_pack_hints_are_those_of_the_tables():
    """Run ``nox -s hints`` when this fails."""
    packs = {
        entry.name: path.relative_to(ROOT / "packages").parts[0]
        for path in sorted(ROOT.glob("packages/hyper-parallel-ops-*/src/**/*.yaml"), reverse=True)  # basic comes last
        for entry in OpTable.from_path(path).entries()
    }
    assert packs == hyper_parallel.registry.pack_hints.PACK_OF_OP


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_every_package_says_what_it_is(path):
    readme = path.with_name("README.md").read_text()
    assert readme.startswith("# ")


def test_packs_use_no_private_name_of_core():
    """What our packages do, a third party's plugin must be able to do."""
    private = {name for name in dir(DTensor) if name[0] == "_"} - set(dir(torch.Tensor))
    modules = {path.stem for path in ROOT.glob("packages/hyper-parallel-core/src/hyper_parallel/*.py")}
    found = []
    for path in ROOT.glob("packages/hyper-parallel-*/src/**/*.py"):
        if "hyper-parallel-core" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                of_module = owner in modules and node.attr[0] == "_"
                names = [node.attr] if of_module or (owner != "self" and node.attr in private) else []
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hyper_parallel":
                names = [name.name for name in node.names if name.name[0] == "_"]
            else:
                continue
            found += [f"{path.name}:{node.lineno} {name}" for name in names]
    assert found == []


def test_every_redistribution_error_carries_its_operator_and_layouts():
    bare = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "RedistributionError":
                if not {"op_name", "layouts"} <= {keyword.arg for keyword in node.keywords}:
                    bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert bare == []
