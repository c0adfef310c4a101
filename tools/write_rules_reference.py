"""Writes docs/rules-api.md, the page of the names that plugin authors may import, from rules.py and its docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

from hyper_parallel import rules

TARGET = Path(__file__).parents[1] / "docs" / "rules-api.md"

FIRST = "0.1.0"
#: Names that came later than the first version, with theirs.
SINCE: dict[str, str] = {}
#: Values, which have no docstring.
VALUES = {
    "Intervals": "Ranges of global indices of one dim, `[(start, end), ...]`.",
    "LOW": "Dtypes with fewer than 32 bits, in which sums are made in float32.",
    "NOTHING": "The index of an element that is fetched from nowhere and is filled in.",
    "NOT_VARYING": "The empty set of mesh axes: a gradient that is whole on every rank.",
    "P": "`Partial('sum')`, for rows of strategies.",
    "R": "`Replicate()`, for rows of strategies.",
    "state": "The switches in force: `state.mode.policy`, `state.mode.replicate_plain`, `state.mode.skip`.",
}
_ROLE = re.compile(r":\w+:`~?\.?([\w.]+)`")


def render() -> str:
    """The text of the page."""
    parts = [
        "# The API of plugin authors",
        "<!-- Written by `nox -s rules_reference` from hyper_parallel/rules.py; a test compares the two. -->",
        "What an op pack, a parallel style or a training wrapper may import of core: these names from "
        "`hyper_parallel.rules`, the names that users write from `hyper_parallel`, hooks and op tables from "
        "`hyper_parallel.plugins`, error classes from `hyper_parallel.errors`, the conformance kit from "
        "`hyper_parallel.testing`. Our own packages import nothing else (a test looks). They keep their meaning "
        "between releases of one minor version; all other modules of core may move at any time. How rules are "
        "written: [Write an operator](write-an-op.md).",
    ]
    for title, names in sections():
        parts.append(f"## {title}\n\n| name | what it is | since |\n|---|---|---|\n" + "\n".join(map(row, names)))
    return "\n\n".join(parts) + "\n"


def sections() -> list[tuple[str, list[str]]]:
    """The comments that head groups of imports in rules.py, and the names below each."""
    found: list[tuple[str, list[str]]] = []
    source = Path(rules.__file__).read_text()
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    for number, line in enumerate(source.splitlines(), start=1):
        if line.startswith("# "):
            found.append((line.removeprefix("# "), []))
        found_here = [alias.name for node in imports if node.lineno == number for alias in node.names]
        if found_here:
            found[-1][1].extend(found_here)
    return found


def row(name: str) -> str:
    """One line of a table: the name with its parameters, the first sentence of its docstring, its version."""
    value: Any = getattr(rules, name)
    text = VALUES.get(name) or first_sentence(inspect.getdoc(value) or "")
    shown = f"{name}({', '.join(inspect.signature(value).parameters)})" if inspect.isfunction(value) else name
    return f"| `{shown}` | {text} | {SINCE.get(name, FIRST)} |"


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, as Markdown for a cell of a table."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])(?<!e\.g\.)\s+(?=[A-Z`:])", paragraph)[0]
    return _ROLE.sub(r"`\1`", sentence).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
