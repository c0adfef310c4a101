"""What ``hyper-parallel doctor`` looks at. Torch is asked in a process of its own: it may be broken, or absent."""

from __future__ import annotations

import difflib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hyper_parallel._public_names import FIRST_PARTY_DIST_OF
from hyper_parallel.cli.installation_problems import op_conflicts
from hyper_parallel.cli.installed_packages import Package, entry_points_of_project, packages_of_interest
from hyper_parallel.errors import OpConflictError
from hyper_parallel.plugins import PluginManager
from hyper_parallel.plugins.environment import ALLOW, DISABLE, PREFER, STRICT
from hyper_parallel.plugins.record import how_to_get
from hyper_parallel.registry.pack_hints import PACK_OF_OP
from hyper_parallel.registry.registry import TABLES_FOLDER, Registry
from hyper_parallel.utils.function_names import is_module_function

Status = Literal["ok", "warn", "fail"]

TRACEBACK_LINES = 4
TORCH_TIMEOUT = 120.0
"""Seconds that ``import torch`` may take."""

# The last one is that of dispatch.check_results, which imports torch.
_VARIABLES = (ALLOW, DISABLE, PREFER, STRICT, TABLES_FOLDER, "HYPER_PARALLEL_CHECK")
# Not ours, but the first things to know when a device is missing or a rank does not find the others.
_OTHER_VARIABLES = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

#: The packages of this project, which all have one version.
OUR_PACKAGES = ("hyper-parallel", "hyper-parallel-core", *sorted({*PACK_OF_OP.values(), *FIRST_PARTY_DIST_OF.values()}))

_ASK_TORCH = """
import json, torch, torch.distributed as dist
known = ("gloo", "nccl", "hccl", "xccl", "mpi", "ucc")
backends = [b for b in known if dist.is_available() and dist.is_backend_available(b)]
devices = {}
for kind in ("cuda", "npu", "xpu", "mps"):
    module = getattr(torch, kind, None)
    if module is not None and module.is_available():
        devices[kind] = module.device_count()
facts = {"version": torch.__version__, "file": torch.__file__, "backends": backends, "devices": devices}
try:
    from hyper_parallel.torch_compat import CHANGES, OTHER_CHANGES, READ_IN
    told = [[f"{c.where}: else {c.why}" for c in changes] for changes in (CHANGES, OTHER_CHANGES)]
    facts["changes"], facts["other_changes"], facts["read_in"] = *told, READ_IN
except (ImportError, AttributeError) as error:
    facts["missing"] = str(error)
print("ANSWER" + json.dumps(facts))
"""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: ``fail`` is something that does not work, ``warn`` something that will surprise.
        detail: what was found.
        more: lines that say more, such as the end of a traceback.
        fix: what to do, empty when nothing is to be done.
    """

    name: str
    status: Status
    detail: str
    more: tuple[str, ...] = ()
    fix: str = ""


def all_checks(manager: PluginManager, ranks: int = 0) -> Iterator[Check]:
    """Run every check. One that itself fails is a failed check, not the end of the report.

    Args:
        manager: the plugins to judge.
        ranks: start so many local ranks and let them add up a number; 0 leaves this out.
    """
    checks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", _python),
        ("torch", _torch),
        ("packages", _packages),
        ("plugins", lambda: _plugins(manager)),
        ("ops", lambda: _ops(manager)),
        ("environment", lambda: _environment(os.environ)),
    ]
    if ranks:
        checks.append(("ranks", lambda: _ranks(ranks)))
    for name, run in checks:
        try:
            yield from run()
        except Exception as error:
            yield Check(name, "fail", f"{type(error).__name__}: {error}")


def _python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()}, {sys.executable}")


def _torch() -> Iterator[Check]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        yield Check("torch", "fail", f"import torch did not end within {TORCH_TIMEOUT:g} s")
        return
    answer = done.stdout.partition("ANSWER")[2]
    if done.returncode or not answer:
        tail = tuple(done.stderr.strip().splitlines()[-TRACEBACK_LINES:])
        absent = bool(tail) and tail[-1] == "ModuleNotFoundError: No module named 'torch'"
        detail = "is not installed" if absent else f"import torch ended with exit code {done.returncode}"
        fix = f"{sys.executable} -m pip install {'' if absent else '--force-reinstall '}torch"
        yield Check("torch", "fail", detail, () if absent else tail, fix)
        return
    facts = json.loads(answer)
    devices = ", ".join(f"{count} {kind}" for kind, count in facts["devices"].items()) or "no accelerator"
    yield Check("torch", "ok", f"{facts['version']}, {facts['file']}")
    yield _changes(facts)
    yield Check("devices", "ok", devices)
    if facts["backends"]:
        yield Check("backends", "ok", ", ".join(facts["backends"]))
    else:
        yield Check(
            "backends", "fail", "this torch has no backend of torch.distributed", fix="install another build of torch"
        )


def _changes(facts: Mapping[str, Any]) -> Check:
    """What is changed in torch, and whether this torch has the private names that are used."""
    if "missing" in facts:
        fix = "use a version of torch that this version of hyper-parallel-core knows"
        return Check("torch's private names", "fail", f"not all are there: {facts['missing']}", fix=fix)
    changes, others = facts["changes"], facts["other_changes"]
    found = f"{len(changes)} are changed when the first mesh is used, {len(others)} kinds at other times"
    return Check("torch's private names", "ok", f"{found}; read in torch {facts['read_in']}", (*changes, *others))


# -- packages -----------------------------------------------------------------------------------------------------


def _packages() -> Iterator[Check]:
    packages = packages_of_interest()
    ours = [p for p in packages if p.name in OUR_PACKAGES]
    versions = {p.version for p in ours}
    for package in packages:
        yield _package(package)
    if len(versions) > 1:
        listed = tuple(f"{p.name} {p.version}" for p in ours)
        fix = f"{sys.executable} -m pip install -U {' '.join(p.name for p in ours)}"
        yield Check("versions", "fail", "our packages have one version for all, these differ", listed, fix)


def _package(package: Package) -> Check:
    where = (
        f"{package.version}, editable from {package.project}"
        if package.project
        else f"{package.version}, {package.folder}"
    )
    reinstall = f"{sys.executable} -m pip install -e {package.project}"
    if len(package.copies) > 1:
        return Check(
            package.name,
            "fail",
            f"is installed {len(package.copies)} times; the first one counts",
            package.copies,
            f"{sys.executable} -m pip uninstall {package.name}, until it is not installed; then install it again",
        )
    if missing := package.unmet_requirements():
        return Check(
            package.name,
            "fail",
            f"{package.version}, whose requirements are not met",
            missing,
            "install what it asks for",
        )
    if package.project is None:
        return Check(package.name, "ok", where)
    if not package.project.is_dir():
        return Check(
            package.name, "fail", f"{where}, which is gone", fix=f"{sys.executable} -m pip uninstall {package.name}"
        )
    declared = entry_points_of_project(package.project)
    if declared is None or declared == package.plugins:
        return Check(package.name, "ok", where)
    differences = tuple(
        f"{name}: pyproject.toml says {declared.get(name, 'nothing')}, "
        f"installed is {package.plugins.get(name, 'nothing')}"
        for name in sorted({*declared, *package.plugins})
        if declared.get(name) != package.plugins.get(name)
    )
    return Check(
        package.name, "fail", f"{where}: its entry points changed after the installation", differences, reinstall
    )


# -- plugins and ops ----------------------------------------------------------------------------------------------


def _plugins(manager: PluginManager) -> Iterator[Check]:
    Registry(manager).entries()  # reading the tables can find a plugin broken
    manager.public_names()
    records = manager.records()
    if not records:
        yield Check("plugins", "warn", "none is installed")
    for record in records:
        name = f"plugin {record.name}"
        if record.status in ("ok", "blocked"):
            yield Check(name, "ok", "in use" if record.status == "ok" else f"left out: {record.reason}")
            continue
        tail = tuple(record.traceback.strip().splitlines()[-TRACEBACK_LINES:])
        package = record.dist or record.target
        fix = f"update {package}, or leave the plugin out: {DISABLE}={record.name}"
        yield Check(name, "fail", f"{record.status}: {record.reason}", tail, fix)


def _ops(manager: PluginManager) -> Iterator[Check]:
    registry = Registry(manager)
    names = sorted({entry.name for entry in registry.entries()})
    if not names:
        basic = "hyper-parallel-ops-basic"
        fix = f"{basic} {how_to_get(basic, manager.records())}"
        yield Check("ops", "warn", "no operator has a rule: no op pack is in use", fix=fix)
        return
    yield Check(
        "ops",
        "ok",
        f"{len(names)} names have a rule; fingerprint {registry.fingerprint()[:12]}, which all ranks must share",
    )
    replaced = tuple(filter(is_module_function, names))
    if replaced:
        found = f"{len(replaced)} are replaced when their modules are imported, by functions that know DTensors"
        yield Check("functions of modules", "ok", found, replaced)
    for name, error in op_conflicts(registry).items():
        first, *lines = str(error).splitlines()
        fix = "" if isinstance(error, OpConflictError) else f"change {PREFER}"  # a pin to somebody without the op
        yield Check(f"op {name}", "fail", first.partition(" has ")[2] or first, tuple(lines), fix)


# -- environment --------------------------------------------------------------------------------------------------


def _environment(environ: Mapping[str, str]) -> Iterator[Check]:
    for name in sorted(environ):
        if name in _VARIABLES or name in _OTHER_VARIABLES:
            yield Check(name, "ok", repr(environ[name]))
        elif re.match("HYPER_?PARALLEL_", name):
            near = difflib.get_close_matches(name, _VARIABLES, n=1)
            known = f"did you mean {near[0]}?" if near else f"known are {', '.join(_VARIABLES)}"
            yield Check(name, "warn", f"{environ[name]!r}: no such setting", fix=known)


def _ranks(count: int) -> Iterator[Check]:
    from hyper_parallel.testing import WorkerPool

    with WorkerPool(count) as pool:
        sums = pool.run(_sum_of_ranks)
    expected = count * (count - 1) // 2
    right = sums == [expected] * count
    yield Check("ranks", "ok" if right else "fail", f"{count} gloo ranks summed their numbers to {sorted(set(sums))}")


def _sum_of_ranks() -> int:
    import torch
    import torch.distributed as dist

    mine = torch.tensor([dist.get_rank()])
    dist.all_reduce(mine)
    return int(mine)
