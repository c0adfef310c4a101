"""Reports as one HTML file that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ReportTable", "html_report"]

_STYLE = """
body { font: 14px/1.45 sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { text-align: left; vertical-align: top; padding: .25em .9em .25em 0; border-bottom: 1px solid #e4e4e4; }
td { font-family: monospace; white-space: pre-wrap; }
.bad td { background: #fde8e8; } .note td { background: #eef4fd; }
"""


@dataclass(frozen=True)
class ReportTable:
    """A table of a report.

    Attributes:
        title: heading above it.
        header: column titles.
        rows: texts of the cells.
        marks: per row ``""``, ``"bad"`` or ``"note"``, which colours it; none for no colours.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: Sequence[str] = ()


def html_report(title: str, summary: Sequence[str], tables: Sequence[ReportTable]) -> str:
    """A page with a title, a line per sentence of the summary, and tables."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
    ]
    parts += [f"<p>{html.escape(line)}</p>" for line in summary]
    for table in tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>")
        parts += [f"<th>{html.escape(name)}</th>" for name in table.header]
        parts.append("</tr>")
        for index, row in enumerate(table.rows):
            mark = table.marks[index] if table.marks else ""
            parts.append(f'<tr class="{mark}">' if mark else "<tr>")
            parts += [f"<td>{html.escape(cell)}</td>" for cell in row]
            parts.append("</tr>")
        parts.append("</table>")
    return "".join([*parts, "</body></html>\n"])
