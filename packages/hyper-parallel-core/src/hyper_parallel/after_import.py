"""Do something as soon as a module has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

__all__ = ["when_imported"]


def when_imported(name: str, action: Callable[[types.ModuleType], None]) -> None:
    """Call ``action`` with the module ``name``: now if it is imported, else right after its code has run. Nothing is
    imported for it."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    _WATCHER.waiting.setdefault(name, []).append(action)
    if _WATCHER not in sys.meta_path:
        sys.meta_path.insert(0, _WATCHER)


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and adds the actions to what executes them."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[types.ModuleType], None]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            # Modules of one zip file share their loader: ask which one this is.
            for action in self.waiting.pop(module.__name__, ()):
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_WATCHER = _Watcher()
