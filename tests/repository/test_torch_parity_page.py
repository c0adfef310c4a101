"""docs/torch-parity.md has a row, with a test, for every public name and argument of PyTorch's that users know."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(name):
    path = ROOT / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parity = tool("torch_parity")
ALL = [(module, dotted) for module in parity.TABLE for dotted in parity.public_names(module)]
OWN = [(module, dotted) for module, dotted in ALL if parity.TABLE[module].get(dotted) == parity.own()]
OTHERS = [pair for pair in ALL if pair not in OWN]


def test_the_page_is_up_to_date():
    written = (ROOT / "docs" / "torch-parity.md").read_text()
    assert written == tool("write_torch_parity").render(), "write it anew: nox -s torch_parity"


def test_every_public_name_has_a_row_and_no_other():
    for module, names in parity.TABLE.items():
        assert set(names) == set(parity.public_names(module)), module


@pytest.mark.parametrize(("module", "dotted"), OTHERS)
def test_every_argument_has_a_row_and_no_other(module, dotted):
    assert set(parity.TABLE[module][dotted].arguments) == set(parity.parameters(parity.theirs(module, dotted)))


@pytest.mark.parametrize(("module", "dotted"), OTHERS)
def test_every_argument_is_given_as_pytorchs_and_has_its_default(module, dotted):
    given, found = (parity.parameters(of(module, dotted)) for of in (parity.theirs, parity.ours))
    for name, row in parity.TABLE[module][dotted].arguments.items():
        if row.missing:
            assert name not in found
            continue
        assert found[name].kind == given[name].kind, name
        assert found[name].default == given[name].default, name
    order = [n for n, p in found.items() if n in given and p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert order == [n for n in given if n in order]


@pytest.mark.parametrize(("module", "dotted"), OWN)
def test_classes_that_are_pytorchs_own(module, dotted):
    assert parity.ours(module, dotted) is parity.theirs(module, dotted)


def test_every_row_names_a_test_that_exists():
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py")]
    known = set(re.findall(r"^def (test_\w+)\(", "\n".join(path.read_text() for path in files), re.MULTILINE))
    named = {row.test for *_, row in parity.rows()}
    assert named <= known, f"{sorted(named - known)} do not exist"
