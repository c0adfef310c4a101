"""``hyper-parallel ops [NAME]``: which ops have a rule, who provides it, and where it is defined."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
import textwrap
from collections.abc import Sequence

from hyper_parallel.cli.installation_problems import problem_lines
from hyper_parallel.cli.reporting import print_json
from hyper_parallel.cli.rule_descriptions import described_rules
from hyper_parallel.errors import OpConflictError, PluginError
from hyper_parallel.plugins import Command, default_manager
from hyper_parallel.registry import Registry
from hyper_parallel.registry.messages import way_to_get
from hyper_parallel.registry.op_entry import OpEntry
from hyper_parallel.utils.function_names import bare_functions, base_names, dotted_function, is_dotted


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="an op or a function, for all about its rule")
    parser.add_argument(
        "--import",
        dest="module",
        metavar="MODULE",
        help="import this first, as the module that defines a torch.ops operator",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.module is not None:
        importlib.import_module(arguments.module)
    registry = Registry(default_manager())
    entries = registry.entries() if arguments.name is None else _entries_of(arguments.name, registry)
    if arguments.name is not None and not entries:
        return _unknown(arguments.name, registry)
    if arguments.name is None:
        problems = problem_lines(default_manager(), registry)
        if arguments.json:
            print_json(ok=not problems, ops=[_as_json(entry, registry) for entry in entries], problems=problems)
        else:
            print("\n".join([_listing(entries), *problems]))
        return int(bool(problems))
    rules = described_rules(entries)
    if arguments.json:
        about = zip(entries, rules, strict=True)
        print_json(ops=[{**_as_json(entry, registry), "rule": rule.as_json()} for entry, rule in about])
    else:
        texts = [f"{_described(e, registry)}\n{rule.as_text()}" for e, rule in zip(entries, rules, strict=True)]
        print("\n\n".join(texts))
    return int(any(_verdict(entry, registry) == "conflict" for entry in entries))


def _entries_of(name: str, registry: Registry) -> list[OpEntry]:
    """The entries of an op name, or of the function that has this name: ``index_add_``, ``F.silu``."""
    for candidate in (name, *base_names(name)):
        if found := registry.entries(candidate):
            return found
    try:
        import torch.nn.functional  # noqa: F401  # dotted names are looked up among what is imported
    except ImportError:  # the tables can be read without it
        return []
    dotted = f"torch.nn.functional.{name[2:]}" if name.startswith("F.") else name
    functions = [dotted_function(dotted)] if is_dotted(dotted) else bare_functions(dotted)
    return [entry for function in functions if function is not None for entry in registry.entries_of(function)]


def _listing(entries: Sequence[OpEntry]) -> str:
    """The names, as many on a line as fit, under their provider and the file that lists them."""
    places: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        places.setdefault((entry.provider, entry.source.rpartition(":")[0]), []).append(entry.name)
    texts = []
    for (provider, file), names in places.items():
        lines = textwrap.wrap("  ".join(names), 78, break_long_words=False, break_on_hyphens=False)
        texts.append("\n".join([f"{provider}  {file}", *(f"  {line}" for line in lines)]))
    return "\n\n".join(texts) + "\n\nhyper-parallel ops NAME says what a rule takes and gives"


def _unknown(name: str, registry: Registry) -> int:
    way = way_to_get(name, default_manager().records())
    if way is not None:
        print(f"hyper-parallel: no op named {name!r} has a rule here; {way}", file=sys.stderr)
        return 1
    names = sorted({entry.name for entry in registry.entries()})
    within = [each for each in names if name in each.split(".")]  # as a class in what is listed as Class.apply
    near = within or difflib.get_close_matches(name, names, n=3)
    hint = f"; similar: {', '.join(near)}" if near else ""
    print(f"hyper-parallel: no op named {name!r} has a rule{hint}", file=sys.stderr)
    return 1


def _described(entry: OpEntry, registry: Registry) -> str:
    params = ", ".join(f"{name}={value!r}" for name, value in entry.params.items())
    lines = [
        entry.name,
        f"  provider  {entry.provider}{f' {entry.version}' if entry.version else ''}",
        f"  class     {entry.class_path}",
        f"  source    {entry.source}",
        f"  in use    {_verdict(entry, registry)}",
    ]
    if params:
        lines.insert(3, f"  params    {params}")
    if entry.override:
        lines.append(f"  replaces  {'every plugin' if entry.override is True else ', '.join(sorted(entry.override))}")
    return "\n".join(lines)


def _verdict(entry: OpEntry, registry: Registry) -> str:
    """``yes``, ``no`` or ``conflict``: whether this entry, or one that does the same, counts for its name."""
    try:
        chosen = registry.chosen(entry.name)
        return "yes" if chosen is not None and entry.does_the_same_as(chosen) else "no"
    except OpConflictError:
        return "conflict"
    except PluginError as error:  # a pin that names somebody who does not provide the op
        return f"no: {str(error).splitlines()[0]}"


def _as_json(entry: OpEntry, registry: Registry) -> dict[str, object]:
    return {
        "op": entry.name,
        "provider": entry.provider,
        "version": entry.version,
        "class": entry.class_path,
        "params": dict(entry.params),
        "source": entry.source,
        "override": entry.override if isinstance(entry.override, bool) else sorted(entry.override),
        "in_use": _verdict(entry, registry),
    }


COMMAND = Command("ops", "list the ops that have a distributed rule, or show one", _run, _add_arguments)
