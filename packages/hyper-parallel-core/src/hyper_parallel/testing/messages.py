"""What the test process and its ranks send each other. Both sides import this, so it imports no torch."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import FunctionType
from typing import Any

from hyper_parallel.testing.failures import NotSendableError, RankFailure

RETURNED, RAISED, SKIPPED = "returned", "raised", "skipped"


@dataclass(frozen=True)
class ModuleFile:
    """Where a module's source is, and whether pytest rewrote its ``assert`` statements in the test process."""

    path: str
    rewritten: bool


@dataclass(frozen=True)
class Task:
    """One function call. The function travels by name, its arguments as a pickle that is opened after the import."""

    module: str
    qualname: str
    on_instance: bool
    arguments: bytes
    module_files: Mapping[str, ModuleFile]
    sys_path: Sequence[str]
    directory: str


@dataclass(frozen=True)
class Reply:
    """How a rank's call ended. ``groups`` counts the process groups that the rank now holds."""

    kind: str
    value: bytes = b""
    failure: RankFailure = field(default=RankFailure("", "", ""))
    groups: int = 0


def make_task(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Task:
    """Describe ``fn(*args, **kwargs)`` for another process.

    Raises:
        NotSendableError: ``fn`` is not reachable by name from its module, or an argument cannot be pickled.
    """
    on_instance = inspect.ismethod(fn) and not inspect.isclass(fn.__self__)
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if module is None or qualname is None:
        raise NotSendableError(
            f"{fn!r} cannot run on other ranks: it has no module and name; give a module-level function"
        )
    if "<" in qualname:  # <locals>, <lambda>
        raise NotSendableError(f"{module}.{qualname} cannot run on other ranks: move it to the top level of its module")
    return Task(
        module=module,
        qualname=qualname,
        on_instance=on_instance,
        arguments=_pickle_arguments(qualname, args, kwargs),
        module_files=_module_files(module),
        sys_path=tuple(sys.path),
        directory=os.getcwd(),
    )


def _pickle_arguments(qualname: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    data = io.BytesIO()
    try:
        _ArgumentPickler(data).dump((tuple(args), dict(kwargs)))
        return data.getvalue()
    except Exception as whole:
        for name, value in [*((f"{i}", a) for i, a in enumerate(args)), *kwargs.items()]:
            try:
                pickle.dumps(value)
            except Exception as exc:
                raise NotSendableError(
                    f"argument {name} of {qualname}, a {type(value).__name__}, cannot be sent to other ranks: {exc}. "
                    "Build it inside the function instead"
                ) from exc
        raise NotSendableError(f"the arguments of {qualname} cannot be sent to other ranks: {whole}") from whole


class _ArgumentPickler(pickle.Pickler):
    """Sends arguments. What ``monkeypatch`` has changed in the test's process stays there, a rank gets its own one."""

    def reducer_override(self, obj: Any) -> Any:
        """A new ``monkeypatch`` in the place of the test's."""
        return (type(obj), ()) if is_monkeypatch(obj) else NotImplemented


def is_monkeypatch(value: Any) -> bool:
    """Whether this is what pytest's fixture ``monkeypatch`` gives."""
    patching = sys.modules.get("_pytest.monkeypatch")  # not imported: then it can be none
    return patching is not None and isinstance(value, patching.MonkeyPatch)


class ResultPickler(pickle.Pickler):
    """Sends what a rank returns. Classes and functions of modules that were loaded from a file go by name, without the
    import of parent packages that pickle does and that pytest's dotted names only pretend."""

    def __init__(self, file: Any, files: Mapping[str, ModuleFile]) -> None:
        super().__init__(file)
        self._files = files

    def reducer_override(self, obj: Any) -> Any:
        """How to find a class or function again, for those modules."""
        if isinstance(obj, (type, FunctionType)) and obj.__module__ in self._files and "<" not in obj.__qualname__:
            return _named, (obj.__module__, obj.__qualname__)
        return NotImplemented


def _named(module: str, qualname: str) -> Any:
    return reduce(getattr, qualname.split("."), sys.modules[module])


def _module_files(wanted: str) -> dict[str, ModuleFile]:
    """Files of the modules that a rank may not find by name: ``wanted``, and all that pytest itself loaded.

    With ``--import-mode=importlib`` a test module has a name such as ``packages.x.tests.test_y`` that no import finds.
    """
    files = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        # pytest also rewrites the whole of a plugin's package, hyper_parallel among them: those are imported normally.
        loader = type(getattr(module, "__loader__", None)).__name__
        rewritten = loader == "AssertionRewritingHook" and _is_test_file(path)
        if rewritten or name == wanted:
            files[name] = ModuleFile(os.path.abspath(path), rewritten)
    return files


def _is_test_file(path: str) -> bool:
    name = os.path.basename(path)
    return name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
