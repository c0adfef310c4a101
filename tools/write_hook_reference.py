"""Writes docs/hooks.md, the reference of the plugin hooks, from the docstrings of the hook specifications."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.plugins import hookspecs

TARGET = Path(__file__).parents[1] / "docs" / "hooks.md"

# A section of a docstring, and its heading on the page.
_HEADINGS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}
_ROLE = re.compile(r":\w+:`~?([\w.]+)`")


def render() -> str:
    """The text of the page."""
    hooks = [getattr(hookspecs, name) for name in vars(hookspecs) if name.startswith("hyper_parallel_")]
    contents = [f"- [`{hook.__name__}`](#{hook.__name__}): {_summary(hook)}" for hook in hooks]
    title, _, introduction = inspect.cleandoc(hookspecs.__doc__ or "").partition("\n\n")
    parts = [
        "# Hooks",
        "<!-- Written by `nox -s hooks` from hyper_parallel/plugins/hookspecs.py; a test compares the two. -->",
        _prose(title),
        _prose(introduction),
        "\n".join(contents),
        *map(_section, hooks),
    ]
    return "\n\n".join(parts) + "\n"


def _section(hook: Callable[..., Any]) -> str:
    signature = str(inspect.signature(hook)).replace("'", "")
    blocks = re.split(r"\n\n(?=\w+::?\n)", inspect.getdoc(hook) or "")
    parts = [f"## {hook.__name__}", f"```python\n{hook.__name__}{signature}\n```", _prose(blocks[0])]
    for block in blocks[1:]:
        head, _, body = block.partition("\n")
        body = textwrap.dedent(body)
        if head == "Example::":
            parts.append(f"```python\n{body.strip()}\n```")
        else:
            parts.append(
                f"**{_HEADINGS[head.rstrip(':')]}**\n\n{_listed(body) if head != 'Returns:' else _prose(body)}"
            )
    return "\n\n".join(parts)


def _listed(body: str) -> str:
    """``name: text`` entries as a list."""
    entries = re.split(r"\n(?=\w+: )", body.strip())
    found = [re.match(r"(\w+): (.*)", entry, re.DOTALL) for entry in entries]
    return "\n".join(f"- `{match[1]}`: {_one_line(match[2])}" for match in found if match)


def _prose(text: str) -> str:
    """Paragraphs in Markdown; an indented block after ``::`` becomes code."""
    parts = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("    "):
            parts.append(f"```toml\n{textwrap.dedent(paragraph)}\n```")
        else:
            parts.append(_one_line(paragraph))
    return "\n\n".join(parts)


def _one_line(text: str) -> str:
    joined = " ".join(text.split()).replace("``", "`")
    return re.sub("::$", ":", _ROLE.sub(r"`\1`", joined))


def _summary(hook: Callable[..., Any]) -> str:
    return _one_line((inspect.getdoc(hook) or "").partition("\n\n")[0].partition(". ")[0].rstrip("."))


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
