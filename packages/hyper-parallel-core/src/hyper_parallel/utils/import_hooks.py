"""Do something as soon as a module has been imported."""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

__all__ = ["when_imported"]

Action = Callable[[types.ModuleType], None]


def when_imported(name: str, action: Action) -> None:
    """Call ``action`` with the module ``name``: now if it is imported, and right after its code has run whenever it is
    imported from now on, or reloaded. Nothing is imported for it."""
    _WATCHER.actions.setdefault(name, set()).add(action)
    if _WATCHER not in sys.meta_path:
        sys.meta_path.insert(0, _WATCHER)
    if name in sys.modules:
        action(sys.modules[name])


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and adds the actions to what executes them."""

    def __init__(self) -> None:
        self.actions: dict[str, set[Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = copy.copy(spec.loader)  # modules of one zip file share it
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for action in self.actions[name]:
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_WATCHER = _Watcher()
