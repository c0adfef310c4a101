"""What the plugin manager knows about one plugin, for messages and for the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from hyper_parallel.errors import PluginError

#: ok: in use. blocked: left out because the user said so. incompatible: written for another plugin API.
#: broken: something in it raised or is invalid.
Status = Literal["ok", "blocked", "incompatible", "broken"]

#: What passes through when a plugin's code runs: the user's interrupt, and how Python closes a generator. Anything else
#: is that plugin's failure, ``sys.exit()`` too: a plugin does not decide when the program ends.
NOT_OURS = (KeyboardInterrupt, GeneratorExit)


@dataclass(eq=False)
class PluginRecord:
    """One plugin.

    Attributes:
        name: its entry point's name, by which users block or prefer it.
        dist: pip package that brings it, or None for one registered by a program.
        version: version of that package.
        target: module that implements the hooks.
        api: the plugin API it was written for, None while unknown.
        status: whether it is in use.
        reason: one line that says why it is not in use, empty when it is.
        remedy: what to do to use one that a setting blocks.
        traceback: the traceback behind ``reason``, where there is one.
        module: the imported module while the plugin is in use.
    """

    name: str
    dist: str | None
    version: str | None
    target: str
    api: int | None = None
    status: Status = "ok"
    reason: str = ""
    remedy: str = ""
    traceback: str = ""
    module: ModuleType | Any = None

    @property
    def origin(self) -> str:
        """The plugin and where it comes from: ``'acme' (acme-hp-ops 0.4.2)``."""
        return f"{self.name!r} ({self.dist} {self.version})" if self.dist else f"{self.name!r} ({self.target})"


def how_to_get(dist: str, plugins: Iterable[PluginRecord]) -> str:
    """What a user does to have the plugin of a package of ours: install it, or stop what keeps it out.

    Args:
        dist: the pip package.
        plugins: those found, in use or not.
    """
    record = next((record for record in plugins if record.dist == dist), None)
    pip = f"{sys.executable} -m pip install"
    if record is None:
        return f"is not installed in {sys.prefix}\n    {pip} {dist}\n    from a clone: {pip} ./packages/{dist}"
    if record.status != "ok":
        return f"is installed but left out: {record.reason}\n    {record.remedy or 'see hyper-parallel plugins'}"
    return f"is installed as version {record.version}, which does not have it yet\n    {pip} -U {dist}"


@dataclass(frozen=True)
class PublicName:
    """A name that a plugin adds to ``hyper_parallel``.

    Attributes:
        name: the public name.
        targets: plugin name to ``"module:attribute"``. More than one different target is a conflict, raised on use.
    """

    name: str
    targets: dict[str, str]

    def load(self) -> Any:
        """Import the object that the name stands for."""
        if len(set(self.targets.values())) > 1:
            given = ", ".join(f"{plugin!r} ({target})" for plugin, target in sorted(self.targets.items()))
            raise PluginError(
                f"hyper_parallel.{self.name} is provided by several plugins: {given}\n"
                f"  disable one: HYPER_PARALLEL_DISABLE_PLUGINS={sorted(self.targets)[-1]}"
            )
        plugin, target = next(iter(self.targets.items()))
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except SystemExit as error:
            raise PluginError(
                f"hyper_parallel.{self.name} of plugin {plugin!r}: {module} ends the program when it is imported "
                f"(SystemExit: {error})",
                plugin=plugin,
            ) from error
