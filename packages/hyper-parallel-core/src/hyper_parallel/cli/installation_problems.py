"""What is wrong with the installed plugins and their operators: the same for every command that shows some of it."""

from __future__ import annotations

from hyper_parallel.errors import OpConflictError, PluginError
from hyper_parallel.plugins import PluginManager, PluginRecord
from hyper_parallel.registry import Registry

__all__ = ["broken_plugins", "op_conflicts", "problem_lines"]


def broken_plugins(manager: PluginManager, registry: Registry) -> list[PluginRecord]:
    """The plugins that are left out although nothing blocks them."""
    registry.entries()  # reading the tables can find a plugin broken
    manager.public_names()
    return [record for record in manager.records() if record.status not in ("ok", "blocked")]


def op_conflicts(registry: Registry) -> dict[str, OpConflictError | PluginError]:
    """Operators whose use is an error, by name: several plugins implement one and nothing says which is meant, or a pin
    names somebody who does not provide it."""
    found: dict[str, OpConflictError | PluginError] = {}
    for name in sorted({entry.name for entry in registry.entries()}):
        try:
            registry.chosen(name)
        except (OpConflictError, PluginError) as error:
            found[name] = error
    return found


def problem_lines(manager: PluginManager, registry: Registry) -> list[str]:
    """A line for each of both."""
    broken = [
        f"plugin {record.origin} is {record.status}: {record.reason}" for record in broken_plugins(manager, registry)
    ]
    return broken + [f"op {name}: {str(error).splitlines()[0]}" for name, error in op_conflicts(registry).items()]
