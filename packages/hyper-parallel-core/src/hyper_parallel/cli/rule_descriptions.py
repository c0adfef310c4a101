"""What ``hyper-parallel ops NAME`` says about a rule: how it is written, and what it takes and gives."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel._rules.op import OpSummary
    from hyper_parallel.analysis.strategy_tables import StrategyTable
    from hyper_parallel.registry.op_entry import OpEntry

LEGEND = "R: replicate, S(d): shard of dim d, P(op): pending reduction"


@dataclass(frozen=True)
class RuleDescription:
    """One rule.

    Attributes:
        kind: ``strategies``, ``code``, ``function`` or ``phases``; ``unknown`` when the class cannot be used here.
        text: the same as a sentence, or why it is unknown.
        tables: sample calls with what the rule takes and gives.
        summary: what the table of operators in the documentation says, communication among it; None: nothing.
    """

    kind: str
    text: str
    tables: Sequence[StrategyTable] = ()
    summary: OpSummary | None = None

    def as_text(self) -> str:
        """Indented lines."""
        lines = [*self._summary_lines(), f"  rule      {self.text}"]
        if self.tables:
            lines.append(f"            {LEGEND}")
        for table in self.tables:
            outputs = max(len(gives) for _, gives in table.rows)
            names = ["result"] if outputs == 1 else [f"result {i}" for i in range(outputs)]
            rows = [(*table.inputs, "", *names), *((*takes, "->", *gives) for takes, gives in table.rows)]
            widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
            lines += ["", f"    {table.call}"]
            lines += [
                "      " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in rows
            ]
        return "\n".join(lines)

    def _summary_lines(self) -> list[str]:
        if self.summary is None:
            return []
        about = {
            "sharded": self.summary.shards,
            "pending": self.summary.pending,
            "comm": self.summary.communicates,
            "whole": self.summary.whole,
        }
        texts = [f"  {label:<8}  {text.replace('`', '')}" for label, text in about.items() if text]
        return [line for text in texts for line in textwrap.wrap(text, 80, subsequent_indent=" " * 12)]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        samples = [
            {
                "call": table.call,
                "rows": [
                    {"inputs": dict(zip(table.inputs, takes, strict=True)), "outputs": list(gives)}
                    for takes, gives in table.rows
                ],
            }
            for table in self.tables
        ]
        summary = None if self.summary is None else asdict(self.summary)
        return {"kind": self.kind, "text": self.text, "samples": samples, "summary": summary}


def described_rules(entries: Sequence[OpEntry]) -> list[RuleDescription]:
    """Describe the rules of some entries; this imports their classes, and torch."""
    try:
        with _two_ranks():
            return [_described(entry) for entry in entries]
    except Exception as error:  # torch is absent or broken, which doctor explains
        text = f"cannot be shown: {type(error).__name__}: {error}; see hyper-parallel doctor"
        return [RuleDescription("unknown", text) for _ in entries]


def _described(entry: OpEntry) -> RuleDescription:
    from hyper_parallel.analysis.sample_calls import functions_of
    from hyper_parallel.analysis.strategy_tables import kind_of, strategy_tables
    from hyper_parallel.errors import PluginError

    try:
        kind, text = kind_of(entry.op)
    except PluginError as error:
        return RuleDescription("unknown", f"cannot be used: {error}")
    tables = strategy_tables(entry)
    if not tables and kind in ("strategies", "code"):
        why = (
            "no sample call could be made up from its signature"
            if functions_of(entry.name)
            else f"nobody has defined {entry.name}: --import the module that does"
        )
        text = f"{text.partition(';')[0]}; {why}"
    return RuleDescription(kind, text, tables, entry.op.summary)


@contextmanager
def _two_ranks() -> Iterator[None]:
    from hyper_parallel.analysis.fake_world import fake_world

    with fake_world(2):
        yield
