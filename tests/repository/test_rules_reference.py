"""The page of the plugin authors' API names all that is declared, says what each is, and is up to date."""

import importlib.util
from pathlib import Path

from hyper_parallel import rules

ROOT = Path(__file__).parents[2]


def tool():
    spec = importlib.util.spec_from_file_location("write_rules_reference", ROOT / "tools" / "write_rules_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date():
    """Run ``nox -s rules_reference`` when this fails."""
    assert (ROOT / "docs" / "rules-api.md").read_text() == tool().render()


def test_every_declared_name_is_in_one_section_and_says_what_it_is():
    names = [name for _, group in tool().sections() for name in group]
    assert sorted(names) == sorted(rules.__all__)
    assert len(names) == len(set(names))
    rows = [tool().row(name) for name in names]
    assert [row for row in rows if "|  |" in row] == []
