"""``hyper-parallel new-plugin NAME``: a package that is a plugin, with two operators, their rules and their tests."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel._public_names import FIRST_PARTY_DIST_OF
from hyper_parallel.cli.reporting import core_version, print_json
from hyper_parallel.plugins import Command, default_manager

if TYPE_CHECKING:
    from importlib.abc import Traversable

_SUFFIX = ".tmpl"
_NAMESPACES = frozenset(
    {"aten", "c10d", "debugprims", "inductor", "mkldnn", "onednn", "prim", "prims", "profiler", "quantized", "rngprims"}
)
"""Namespaces of operators that torch has, where a pack's own would be looked up."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the pip package, such as acme-ops; the plugin is called the same")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to put it (default: here)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    name = arguments.name
    wrong = _wrong_name(name)
    if wrong:
        print(f"hyper-parallel: {name!r} is no name for a plugin: {wrong}", file=sys.stderr)
        return 2
    target = arguments.folder / name
    if target.exists():
        print(f"hyper-parallel: {target} exists already; choose another name or --folder", file=sys.stderr)
        return 1
    written = write_plugin(name, target)
    if arguments.json:
        print_json(folder=str(target), files=[path.relative_to(target).as_posix() for path in written])
        return 0
    package = name.replace("-", "_")
    print(f"{target} has {len(written)} files. Next:\n")
    print(f"  cd {target}")
    print("  python -m pip install -e .[test]")
    print("  hyper-parallel plugins")
    print(f"  hyper-parallel ops torch.ops.{package}.scale_rows --import {package}.operators")
    print("  python -m pytest\n")
    print(f"Your kernels go to src/{package}/operators.py, what they take on sharded tensors to ops.yaml and rules.py.")
    return 0


def _wrong_name(name: str) -> str:
    """Why a package of this name could not be installed, imported or found; empty when it could."""
    if not re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        return "use small letters, digits and single hyphens, as in acme-ops"
    package = name.replace("-", "_")
    if keyword.iskeyword(package):
        return f"import {package} is no Python; use another word, as in {name}-ops"
    if package in _NAMESPACES:
        return f"torch.ops.{package} is taken; use another word, as in {name}-ops"
    if name in (*FIRST_PARTY_DIST_OF.values(), "hyper-parallel", "hyper-parallel-core", "hyper-parallel-ops-basic"):
        return "it is a package of HyperParallel; use a word of your own in front, as in acme-ops"
    if package in sys.stdlib_module_names or _is_importable(package):
        return f"import {package} already means another package here; use another word"
    if any(record.name == name for record in default_manager().records()):
        return "an installed plugin is called so; use another word"
    return ""


def _is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def write_plugin(name: str, target: Path) -> list[Path]:
    """Write the package ``name`` into the folder ``target`` and return its files."""
    values = {"name": name, "package": name.replace("-", "_"), "core": _requirement(core_version())}
    written = []
    for parts, source in _templates(files("hyper_parallel.cli") / "plugin_template"):
        path = target.joinpath(*(_filled(_dotted(part), values) for part in parts))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(source.read_text(encoding="utf-8"), values), encoding="utf-8")
        written.append(path)
    return sorted(written)


def _templates(folder: Traversable, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _templates(item, (*parts, item.name))
        elif item.name.endswith(_SUFFIX):
            yield (*parts, item.name.removesuffix(_SUFFIX)), item


def _requirement(version: str) -> str:
    """Core in this version or a later compatible one; any when core does not know its own."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return "hyper-parallel-core"
    return f"hyper-parallel-core>={version},<{numbers[1]}.{int(numbers[2]) + 1}"


def _dotted(name: str) -> str:
    """Names that begin with a dot are stored without it: packaging tools tend to leave such files out."""
    return "." + name.removeprefix("dot-") if name.startswith("dot-") else name


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub("@(name|package|core)@", lambda match: values[match[1]], text)


COMMAND = Command("new-plugin", "write a package with operators of your own, ready to install", _run, _add_arguments)
