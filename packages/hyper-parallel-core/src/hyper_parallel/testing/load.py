"""Loading, inside a rank, of the modules that a task's function and arguments come from."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from types import CodeType, ModuleType
from typing import Any

from hyper_parallel.testing.messages import ModuleFile, Task


def load_call(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and the arguments of ``task``."""
    if list(task.sys_path) != sys.path:
        sys.path[:] = task.sys_path
        importlib.invalidate_caches()
    os.chdir(task.directory)
    *outer, last = task.qualname.split(".")
    target: Any = reduce(getattr, outer, _load_module(task.module, task.module_files))
    if task.on_instance:  # a test method: pytest makes a fresh instance for each test as well
        target = target()
    fn = getattr(target, last)
    args, kwargs = _Unpickler(task.arguments, task.module_files).load()
    return fn, args, kwargs


class _Unpickler(pickle.Unpickler):
    """Finds classes and functions of test modules, which an ordinary import may not."""

    def __init__(self, data: bytes, files: Mapping[str, ModuleFile]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def find_class(self, module: str, name: str) -> Any:
        if module in self._files:
            # Not by an import, which would look for the parent packages that pytest's dotted names only pretend.
            return reduce(getattr, name.split("."), _load_module(module, self._files))
        return super().find_class(module, name)


def _load_module(name: str, files: Mapping[str, ModuleFile]) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    source = files.get(name)
    if source is None or (not source.rewritten and _importable(name, source.path)):
        return importlib.import_module(name)
    return _load_file(name, source)


def _importable(name: str, path: str) -> bool:
    """Whether importing ``name`` gives the file at ``path``, and not a namesake."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(path)


def _load_file(name: str, source: ModuleFile) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, source.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name} from {source.path}", name=name, path=source.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        if source.rewritten:
            exec(_compile_with_pytest(source.path), module.__dict__)
        else:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _compile_with_pytest(path: str) -> CodeType:
    """Compile a test module so that a failing ``assert`` tells its values, as it does in the test process."""
    with open(path, "rb") as file:
        text = file.read()
    tree = ast.parse(text, filename=path)
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:  # a private name of pytest: without it only the values in the message are lost
        pass
    else:
        rewrite_asserts(tree, text, path)
    return compile(tree, path, "exec", dont_inherit=True)
