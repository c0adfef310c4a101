"""``hyper-parallel doctor``: whether this installation is in order, and the fix for what is not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from hyper_parallel.cli.reporting import print_json, print_table
from hyper_parallel.plugins import Command, default_manager


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="also start N local ranks and let them communicate"
    )


def _run(arguments: argparse.Namespace) -> int:
    from hyper_parallel.cli.health_checks import all_checks

    checks = list(all_checks(default_manager(), arguments.ranks))
    failed = sum(check.status == "fail" for check in checks)
    if arguments.json:
        print_json(ok=not failed, checks=[asdict(check) for check in checks])
        return int(failed > 0)
    notes = ["\n".join([*check.more, *([f"fix: {check.fix}"] if check.fix else [])]) for check in checks]
    print_table(("CHECK", "STATUS", "FOUND"), [(c.name, c.status, c.detail) for c in checks], notes)
    print(f"\n{_verdict([check.status for check in checks])}")
    return int(failed > 0)


def _verdict(statuses: Sequence[str]) -> str:
    for status, verb in (("fail", "failed"), ("warn", "gave a warning")):
        if status in statuses:
            return f"{statuses.count(status)} of {len(statuses)} checks {verb}"
    return "everything is in order"


COMMAND = Command(
    "doctor", "check this installation: versions, devices, packages, plugins, settings", _run, _add_arguments
)
