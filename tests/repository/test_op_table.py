"""The page about the operators is the one that the registry gives, and the operators are as many as promised."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from hyper_parallel.registry import default_registry

ROOT = Path(__file__).parents[2]


def tool():
    spec = importlib.util.spec_from_file_location("write_op_table", ROOT / "tools" / "write_op_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date():
    """Run ``nox -s ops`` when this fails."""
    # In a process of its own: other tests define operators.
    code = "import runpy; print(runpy.run_path('tools/write_op_table.py')['render'](), end='')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert page == done.stdout
    assert "see there" not in page  # what the tool writes for a rule without a summary


def test_aliases_count_once():
    assert tool().count_functions(["abs", "absolute", "add", "_foreach_add", "torch.linalg.inv", "inverse"]) == 3


def test_at_least_250_functions_have_rules():
    assert tool().count_functions(entry.name for entry in default_registry().entries()) >= 250
