"""Results of cells in files, one a line, so that a run can be stopped and go on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cells import Cell


def tree_digest(root: Path) -> str:
    """Of the sources of all packages and of this tool: a result of another state says nothing about this one."""
    digest = hashlib.sha256()
    for path in sorted([*root.glob("packages/*/src/**/*.py"), *root.glob("packages/*/src/**/*.yaml")]):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    for name in ("zoo", "judge", "on_ranks", "float64"):
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """What is known of this state of the sources.

    Args:
        folder: of the files, one for each part of a run; all are read.
        state: digest of the sources.
        part: name of the file that is written.
    """

    def __init__(self, folder: Path, state: str, part: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state = state
        self.file = folder / f"{part}.jsonl"
        self.known: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if entry["state"] == state:
                    self.known[entry["cell"]] = entry["result"]

    def of(self, cell: Cell) -> dict[str, Any] | None:
        return self.known.get(cell.title)

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        self.known[cell.title] = result
        entry = {"state": self.state, "cell": cell.title, "options": asdict(cell), "result": result}
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")
