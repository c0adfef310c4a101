"""Writes docs/ops.md, the table of all operators, from the registry and the rules' own summaries."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from hyper_parallel._rules.op import DistributedOp, OpSummary
from hyper_parallel.registry import default_registry
from hyper_parallel.registry.op_entry import OpEntry
from hyper_parallel.utils import function_names

TARGET = Path(__file__).parents[1] / "docs" / "ops.md"
_INTRODUCTION = """\
# Operators

<!-- Written by `nox -s ops` from the registry; a test compares the two. -->

Every operator that the installed packs know: {count} torch functions, each counted once (aliases, in-place forms,
operators and private functions not), forward and backward. `hyper-parallel ops NAME` shows one with what it takes and
gives, name by name.

- A **sharded dim** stays sharded in the result, unless the table says what it leaves. All dims may be uneven, and empty
  on some ranks. Several mesh axes may shard one dim.
- A **pending sum** (`Partial`) passes where the operator is linear; otherwise it is reduced, once, and the reduced form
  remembered.
- **Communication** is that inside the operator, forward | backward, for the axes that shard the dims named; "none"
  means that every rank works on its own piece. What inputs that do not fit need (the policy decides), and the gradients
  of whole inputs of sharded work, come on top; see [gradient types](gradient-types.md).
- **Whole** says which inputs cannot stay sharded, and why: these are redistributed as the policy allows, or refused.

An id out of range raises on the ranks that see it: where ids are sharded the others fail when they next communicate
with these, as with any error of one rank. Class losses tell all ranks (`cross_entropy`, `nll_loss`).

An in-place form keeps its target's layout. `out=` is an argument of every function that has it. Operators of
`torch.ops.aten` run by the rule of the function of the same name.
"""


def render() -> str:
    """The text of the page."""
    registry = default_registry()
    entries = [entry for entry in registry.entries() if registry.chosen(entry.name) is entry]
    parts = [_INTRODUCTION.format(count=count_functions(entry.name for entry in entries))]
    tables: dict[tuple[str, str], list[OpEntry]] = {}
    for entry in entries:
        tables.setdefault((entry.provider, entry.source.rpartition(":")[0]), []).append(entry)
    for (provider, table), members in sorted(tables.items()):
        name = Path(table).stem.replace("_", " ")
        parts += [f"## {name[0].upper()}{name[1:]} ({provider})", _table(members)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_NOT_PUBLIC = ("hyper_parallel", "torch._C.", "torch.ops.aten.")


def count_functions(names: Iterable[str]) -> int:
    """Number of distinct public torch functions among op names, aliases counted once."""
    found = set()
    for name in names:
        short = name.rpartition(".")[2]
        if short.startswith("_") or "torch_npu" in name or name.startswith(_NOT_PUBLIC):
            continue
        functions = (
            [function_names.dotted_function(name)]
            if function_names.is_dotted(name)
            else function_names.bare_functions(name)
        )
        alias = next((a for f in functions if (a := _alias_of(f)) is not None), None)
        found.add((alias or short).rstrip("_"))
    return len(found)


def _alias_of(function: object) -> str | None:
    match = re.search(r"^\s*Alias (?:for|of) :\w+:`~?([\w.]+)", getattr(function, "__doc__", None) or "", re.MULTILINE)
    return match[1].rpartition(".")[2] if match else None


def _table(entries: Iterable[OpEntry]) -> str:
    rows: dict[tuple[str, OpSummary], list[str]] = {}
    for entry in entries:
        rule = entry.class_path.rpartition(":")[2]
        rows.setdefault((rule, _summary(entry.op)), []).append(entry.name.removeprefix("torch.nn.functional."))
    lines = ["| functions | sharded dims | pending sum | communication | whole |", "|---|---|---|---|---|"]
    for (_, summary), names in sorted(rows.items(), key=lambda row: row[1]):
        cells = [" ".join(f"`{n}`" for n in sorted(names)), summary.shards, summary.pending, summary.communicates]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in [*cells, summary.whole or '-'])} |")
    return "\n".join(lines)


def _summary(op: DistributedOp) -> OpSummary:
    """What the rule says of itself; else the first paragraph of its docstring."""
    if op.summary is not None:
        return op.summary
    first = (inspect.getdoc(type(op)) or type(op).__name__).partition("\n\n")[0]
    return OpSummary(" ".join(first.replace("``", "`").split()), "see there", "see there")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
