"""Which op names mean a torch function, and how directly each does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hyper_parallel.utils import function_names
from hyper_parallel.utils.function_names import Function

_DOTTED, _BARE, _AUTOMATIC = 3, 2, 1


class FunctionIndex:
    """The functions that some op names mean.

    Args:
        names: bare and dotted op names (:mod:`hyper_parallel.utils.function_names`). A dotted name whose module nobody
            has imported means nothing until somebody has.
    """

    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        self._names = frozenset(names)
        self._by_function: dict[Function, dict[str, int]] = {}
        self._unresolved: list[str] = []
        for name in names:
            if function_names.is_dotted(name):
                self._unresolved.append(name)
                continue
            for function in function_names.bare_functions(name):
                self._note(function, name, _BARE)
            for form in function_names.automatic_names(name):
                for function in function_names.bare_functions(form):
                    self._note(function, name, _AUTOMATIC)
        self._resolve_imported_since()

    def names_of(self, function: Function) -> Mapping[str, int]:
        """The names that mean a function as it arrives in ``__torch_function__``, each with its directness: a dotted
        name is more direct than a bare one, and that than one whose automatic form it is. Empty when none does."""
        served = function_names.name_of_served(function)
        if served is not None:  # of a class that may have been loaded again since
            return {served: _DOTTED} if served in self._names else {}
        for form in function_names.lookup_forms(function):
            if form in self._by_function:
                return self._by_function[form]
        return self.names_of(function) if self._resolve_imported_since() else {}

    def _resolve_imported_since(self) -> bool:
        """Look for dotted names whose module was not there before; True when one was found."""
        waiting = []
        for name in self._unresolved:
            function = function_names.dotted_function(name)
            if function is None:
                waiting.append(name)
            else:
                self._note(function, name, _DOTTED)
        found = len(waiting) < len(self._unresolved)
        self._unresolved = waiting
        return found

    def _note(self, function: Function, name: str, directness: int) -> None:
        names = self._by_function.setdefault(function, {})
        names[name] = max(directness, names.get(name, 0))
