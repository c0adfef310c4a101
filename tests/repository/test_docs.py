"""The Python blocks of README and docs that say on how many ranks they run are run there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n# runs on (\d+) ranks?\n(.*?)```", re.DOTALL)


def blocks():
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))):
        shown = path.relative_to(ROOT)
        for number, match in enumerate(BLOCK.finditer(path.read_text())):
            yield pytest.param(int(match[1]), match[2], f"{shown} block {number}", id=f"{shown}-{number}")


def execute(code, name):
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("count", "code", "name"), list(blocks()))
def test_block_runs(ranks, count, code, name):
    ranks(count, execute, code, name)


def test_every_page_and_path_that_is_named_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("*/README.md")]
    assert len(pages) > 20
    for path in pages:
        text = path.read_text()
        for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
        for target in re.findall(r"`((?:docs|examples|benchmarks|tools|packages)/[\w./-]+)`", text):
            assert (ROOT / target).exists(), f"{path.name} names {target}"


def test_every_row_of_the_parity_tables_names_its_test():
    page = (ROOT / "docs" / "tensor-parallel-parity.md").read_text()
    tests = (ROOT / "packages" / "hyper-parallel-tp" / "tests").rglob("test_*.py")
    known = set(re.findall(r"^def (test_\w+)\(", "\n".join(path.read_text() for path in tests), re.MULTILINE))
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert len(rows) > 40
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])
        assert named, f"no test is named: {row}"
        assert set(named) <= known, f"{set(named) - known} do not exist"
