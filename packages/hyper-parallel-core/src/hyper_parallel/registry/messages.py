"""What users read when an op has no rule, or too many: what there is, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from hyper_parallel.errors import OpConflictError
from hyper_parallel.plugins.environment import DISABLE, PREFER
from hyper_parallel.plugins.record import PluginRecord, how_to_get
from hyper_parallel.registry.op_entry import USER, OpEntry
from hyper_parallel.registry.pack_hints import PACK_OF_OP
from hyper_parallel.utils import function_names

TUTORIAL = "docs/write-an-op.md"


def missing_text(shown: str, names: Iterable[str], plugins: Sequence[PluginRecord]) -> str:
    """What to tell a user whose function has no rule.

    Args:
        shown: readable name of the function, or name of the op.
        names: the op names that have one.
        plugins: those found, in use or not.
    """
    lines = [f"{shown} has no distributed rule"]
    way = way_to_get(shown, plugins)
    if way is not None:
        lines.append(f"  {way}")
    elif shown.startswith(("torch.distributed.", "torch.ops._c10d_functional.", "torch.ops.c10d.")):
        lines.append(
            "  it takes plain tensors: pass x.to_local(), or say it with layouts: x.redistribute(...), "
            "x.full_tensor(), or the differentiable hyper_parallel.all_reduce, all_gather, reduce_scatter, all_to_all"
        )
    else:
        lines.append(f"  add one, in YAML or in a few lines of Python: {TUTORIAL}")
        near = difflib.get_close_matches(_short(shown), names, n=3)
        if near:
            lines.append(f"  similar names that have a rule: {', '.join(near)}")
    left_out = [f"{plugin.name} ({plugin.status})" for plugin in plugins if plugin.status != "ok"]
    if left_out:
        lines.append(f"  note: these plugins are left out: {', '.join(left_out)}; see hyper-parallel plugins")
    return "\n".join(lines)


def way_to_get(shown: str, plugins: Sequence[PluginRecord]) -> str | None:
    """Which pack of ours, of those not in use, has a rule for a function, and how to have it; None where none has."""
    pack = known_pack(shown)
    if pack is None or any(plugin.dist == pack and plugin.status == "ok" for plugin in plugins):
        return None
    return f"{pack} has one, but {how_to_get(pack, plugins)}"


def known_pack(shown: str) -> str | None:
    """The pack of ours that has a rule for a function, given by its readable name; None when none is known to."""
    short = _short(shown)
    names = (shown, short, *function_names.base_names(short))
    return next((PACK_OF_OP[name] for name in names if name in PACK_OF_OP), None)


def _short(shown: str) -> str:
    """A readable name without its home."""
    return shown.removesuffix(".__get__").rpartition(".")[2]


def taken_error(name: str, entries: Sequence[OpEntry]) -> OpConflictError:
    """The error for a registration of an op that somebody has registered already."""
    return OpConflictError(
        f"op {name!r} is already registered:\n{listing(entries)}\n"
        f"  to replace it: register_distributed_op({name!r}, op, override=True)",
        op_name=name,
        entries=entries,
    )


def conflict_error(shown: str, entries: Sequence[OpEntry]) -> OpConflictError:
    """The error for an op that several providers implement, none of which counts before the others."""
    providers = sorted({entry.provider for entry in entries})
    plugins = [provider for provider in providers if provider != USER]
    name = entries[0].name
    text = f"op {shown!r} has {len(entries)} implementations and nothing says which is meant:\n{listing(entries)}"
    if len(providers) > 1:
        in_code = f"hyper_parallel.registry.prefer({name!r}, {plugins[0]!r})"
        text += f"\n  choose one:     {PREFER}={name}={plugins[0]}   or   {in_code}"
    if plugins:
        text += f"\n  or disable one: {DISABLE}={plugins[-1]}"
    return OpConflictError(text, op_name=shown, entries=entries)


def listing(entries: Sequence[OpEntry]) -> str:
    """One indented line per entry: provider, class, and where it was registered."""
    rows = [(entry.provider, entry.class_path, entry.source) for entry in sorted(entries, key=by_provider)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {p:<{widths[0]}}  {c:<{widths[1]}}  {s}" for p, c, s in rows)


def by_provider(entry: OpEntry) -> tuple[str, str]:
    """Sort key of entries."""
    return entry.provider, entry.source
