"""``hyper-parallel plugins``: which plugins are installed, whether they are in use, and why not."""

from __future__ import annotations

import argparse
from collections import Counter

from hyper_parallel.cli.installation_problems import broken_plugins, op_conflicts
from hyper_parallel.cli.reporting import print_json, print_table
from hyper_parallel.plugins import Command, PluginRecord, default_manager
from hyper_parallel.registry import Registry


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    manager = default_manager()
    registry = Registry(manager)
    broken, conflicts = broken_plugins(manager, registry), op_conflicts(registry)
    entries, failed = registry.entries(), bool(broken or conflicts)
    ops = Counter(entry.provider for entry in entries)
    overrides = Counter(entry.provider for entry in entries if entry.override)
    records = manager.records()
    if arguments.json:
        shown = [_as_json(record, ops[record.name], overrides[record.name]) for record in records]
        print_json(ok=not failed, plugins=shown, conflicts=sorted(conflicts))
        return int(failed)
    if not records:
        print("no plugins are installed; the common ops are in hyper-parallel-ops-basic")
        return 0
    headers = ("PLUGIN", "DISTRIBUTION", "VERSION", "API", "STATUS", "OPS", "OVERRIDES")
    rows = [
        (
            record.name,
            record.dist or "-",
            record.version or "-",
            "-" if record.api is None else str(record.api),
            record.status,
            str(ops[record.name] or "-"),
            str(overrides[record.name] or "-"),
        )
        for record in records
    ]
    # The traceback ends with the reason, so one of the two is enough.
    notes = [record.traceback or ": ".join(filter(None, (record.reason, record.remedy))) for record in records]
    print_table(headers, rows, notes)
    if conflicts:
        print(f"\nin conflict: {', '.join(conflicts)}; hyper-parallel ops NAME says between whom")
    return int(failed)


def _as_json(record: PluginRecord, ops: int, overrides: int) -> dict[str, object]:
    return {
        "name": record.name,
        "distribution": record.dist,
        "version": record.version,
        "module": record.target,
        "api": record.api,
        "status": record.status,
        "reason": record.reason or None,
        "remedy": record.remedy or None,
        "traceback": record.traceback or None,
        "ops": ops,
        "overrides": overrides,
    }


COMMAND = Command("plugins", "list the installed plugins and why one is not in use", _run, _add_arguments)
