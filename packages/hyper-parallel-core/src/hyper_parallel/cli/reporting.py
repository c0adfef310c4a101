"""Plain aligned text for people and versioned JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hyper_parallel.plugins import PluginManager
from hyper_parallel.plugins.environment import STRICT

#: Version of the JSON forms. It grows when a key changes its meaning or goes away, not when one is added.
JSON_SCHEMA = 1

_GREEN, _YELLOW, _RED = "32", "33", "31"
_COLOURS = {
    "ok": _GREEN,
    "blocked": _YELLOW,
    "warn": _YELLOW,
    "incompatible": _RED,
    "broken": _RED,
    "conflict": _RED,
    "fail": _RED,
    "missing": _RED,
}


def tolerant_manager() -> PluginManager:
    """A manager that reports a broken plugin instead of raising, whatever strictness the environment asks for."""
    return PluginManager(environ={name: value for name, value in os.environ.items() if name != STRICT})


def print_json(**content: Any) -> None:
    """Print one JSON object with the schema's and core's version in front."""
    print(json.dumps({"schema": JSON_SCHEMA, "core": core_version(), **content}, indent=2))


def core_version() -> str:
    """Core's version, or ``unknown`` when its metadata is not installed."""
    try:
        return version("hyper-parallel-core")
    except PackageNotFoundError:
        return "unknown"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] | None = None) -> None:
    """Print columns two spaces apart; nothing is cut off, the last column ends where it ends.

    Args:
        headers: column titles.
        rows: texts of the cells.
        notes: lines to print indented below each row, empty for none.
    """
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers) - 1)]

    def line(cells: Sequence[str]) -> str:
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)]
        return "  ".join([*padded, cells[-1]]).rstrip()

    print(line(headers))
    for index, row in enumerate(rows):
        print(_coloured(line(row), row, widths))
        for note in (notes[index] if notes else "").splitlines():
            print(f"             {note}")


def _coloured(text: str, row: Sequence[str], widths: Sequence[int]) -> str:
    """Colour a status cell, for a terminal only: colour codes in a log are noise."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    for column, cell in enumerate(row):
        if cell in _COLOURS:
            start = sum(width + 2 for width in widths[:column])
            return f"{text[:start]}\033[{_COLOURS[cell]}m{cell}\033[0m{text[start + len(cell) :]}"
    return text
