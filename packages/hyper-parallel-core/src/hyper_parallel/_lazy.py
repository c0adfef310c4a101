"""Lazy public names (PEP 562): a name's module is imported when the name is first used.

Core's own names come from a static table. Every other name is asked of the installed plugins, ours and third parties'
alike. A resolved name is kept in the module's globals, so that this code runs once per name.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from hyper_parallel._public_names import CORE_MODULE_OF, FIRST_PARTY_DIST_OF


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of ``package``."""

    def __getattr__(name: str) -> Any:
        if name == "__all__":  # what `from package import *` takes; not kept, as plugins may come
            return sorted({*CORE_MODULE_OF, *_plugin_names()})
        value = _resolve(package, name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        # Only what can be reached: tools that read every listed name (pydoc, inspect, completion) must not meet errors.
        return sorted({*vars(sys.modules[package]), *CORE_MODULE_OF, "__version__", *_plugin_names()})

    return __getattr__, __dir__


def _resolve(package: str, name: str) -> Any:
    if name in CORE_MODULE_OF:
        return getattr(importlib.import_module(CORE_MODULE_OF[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("hyper-parallel-core")
    # Interpreters and tools probe modules for private names all the time; no plugin is asked for those, nor for a
    # submodule that is about to be imported.
    if name.startswith("_") or importlib.util.find_spec(f"{package}.{name}"):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    from hyper_parallel.plugins import default_manager

    manager = default_manager()
    providers = manager.public_names()
    if name in providers:
        return providers[name].load()
    if name in FIRST_PARTY_DIST_OF:
        raise manager.missing_name_error(name, FIRST_PARTY_DIST_OF[name])
    near = difflib.get_close_matches(name, [*CORE_MODULE_OF, *providers, *FIRST_PARTY_DIST_OF], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")


def _plugin_names() -> list[str]:
    from hyper_parallel.plugins import default_manager

    return list(default_manager().public_names())
