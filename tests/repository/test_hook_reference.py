"""The page about the hooks is the one that the hooks' own docstrings give."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date():
    """Run ``nox -s hooks`` when this fails."""
    spec = importlib.util.spec_from_file_location("write_hook_reference", ROOT / "tools" / "write_hook_reference.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs" / "hooks.md").read_text() == tool.render()
