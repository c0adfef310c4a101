"""Writes docs/torch-parity.md, the page of what is as in PyTorch, from the table in torch_parity.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch_parity as parity

TARGET = Path(__file__).parents[1] / "docs" / "torch-parity.md"
_HEAD = """# Same name, same meaning: parity with PyTorch

<!-- Written by `nox -s torch_parity` from tools/torch_parity.py; a test compares it with the installed torch. -->

Every public name of these modules of PyTorch, and every argument, with what it is here and a test that shows it.
Where a meaning differs, the row says how. What tensor parallelism does beyond names is on
[its own page](tensor-parallel-parity.md), `fully_shard` on [another](fully-sharded.md). What is only here has no row.
"""


def render() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for module, names in parity.TABLE.items():
        lines = [f"## `{module}`\n", "| PyTorch | here | test |", "|---|---|---|"]
        for dotted, entry in names.items():
            lines.append(_line(f"`{dotted}`", entry.row))
            lines += [_line(f"&emsp;`{argument}`", row) for argument, row in entry.arguments.items()]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(shown: str, row: parity.Row) -> str:
    return f"| {shown} | {row.here} | `{row.test}` |"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
