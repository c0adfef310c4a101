"""One provider's implementation of one op: where it comes from, and how the op is made on first use."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from hyper_parallel.errors import PluginError
from hyper_parallel.plugins.op_table import TableEntry
from hyper_parallel.plugins.record import NOT_OURS

if TYPE_CHECKING:
    from hyper_parallel._rules.op import DistributedOp

#: Provider of everything that the program itself registers, as opposed to a plugin.
USER = "user"

Origin = Literal["table", "registered", "constructed"]


@dataclass(eq=False)
class OpEntry:
    """One provider's implementation of one op.

    Attributes:
        name: bare or dotted function name.
        provider: the plugin's name, or ``"user"``.
        version: version of the plugin's package, if there is one.
        class_path: ``module:Class`` or ``file.py:Class`` of the implementation, for people.
        params: keyword arguments of the class.
        instance_name: the op object's own name.
        source: ``file:line`` where it was registered.
        override: providers whose implementation this one replaces; True for all others.
        origin: how it was registered.
        instance: the op object, once made.
    """

    name: str
    provider: str
    version: str | None
    class_path: str
    params: Mapping[str, Any]
    instance_name: str
    source: str
    override: bool | frozenset[str]
    origin: Origin
    instance: DistributedOp | None = None
    _make: Callable[[], Any] | None = field(default=None, repr=False)

    # ------------------------------------------------------------------ the op

    @property
    def op(self) -> DistributedOp:
        """The op object, made on first use.

        Raises:
            PluginError: the class cannot be imported, is no DistributedOp, or does not accept the parameters.
        """
        if self.instance is None:
            from hyper_parallel._rules.op import DistributedOp, without_registering

            assert self._make is not None
            try:
                with without_registering():
                    made = self._make()
            except PluginError:
                raise
            except NOT_OURS:
                raise
            except BaseException as error:
                raise self._fault(f"{self.class_path} cannot be made: {type(error).__name__}: {error}") from error
            if not isinstance(made, DistributedOp):
                raise self._fault(f"{self.class_path} made {made!r}, which is no DistributedOp")
            self.instance = made
        return self.instance

    def _fault(self, text: str) -> PluginError:
        provider = "" if self.provider == USER else f" of plugin {self.provider!r}"
        return PluginError(f"op {self.name!r}{provider} ({self.source}): {text}", plugin=self.provider)

    # ------------------------------------------------------------------ relations to others

    def does_the_same_as(self, other: OpEntry) -> bool:
        """Whether it makes no difference which of the two is used: same class, same parameters."""
        if self.origin == other.origin == "table":
            return (self.class_path, self._shown_params) == (other.class_path, other._shown_params)
        if self._make is not None and self._make is other._make:
            return True
        return _described(self.op) == _described(other.op)

    def overrides(self, other: OpEntry) -> bool:
        """Whether this entry was declared to replace the other."""
        if self.provider == other.provider:
            return False
        return self.override is True or (self.override is not False and other.provider in self.override)

    def supersedes(self, older: OpEntry) -> bool:
        """Whether this entry is a new version of an older one of the same provider, which is to be forgotten."""
        if self.provider != older.provider:
            return False
        if self.instance is not None and self.instance is older.instance:
            return True
        if self.origin == "registered" and self.override is True:
            return True
        if self.origin == older.origin == "constructed":
            return self.class_path == older.class_path
        same_table = self.source.rpartition(":")[0] == older.source.rpartition(":")[0]
        return self.provider == USER and self.origin == older.origin == "table" and same_table

    @property
    def fingerprint_line(self) -> str:
        """What ranks must agree on. No paths: environments may lie in different folders."""
        path = Path(self.class_path).name if ".py:" in self.class_path else self.class_path
        override = "all" if self.override is True else ",".join(sorted(self.override or ()))
        version = f" {self.version}" if self.version else ""
        return f"{self.name}: {self.provider}{version} {path} {self._shown_params} override={override}"

    @property
    def _shown_params(self) -> str:
        return repr(sorted(self.params.items()))

    # ------------------------------------------------------------------ the ways to make one

    @classmethod
    def of_table(
        cls, entry: TableEntry, provider: str, *, version: str | None = None, override: bool = False
    ) -> OpEntry:
        """From an entry of a YAML table."""
        made = cls(
            name=entry.name,
            provider=provider,
            version=version,
            class_path=f"{entry.module or entry.file}:{entry.class_name}",
            params=entry.params,
            instance_name=entry.instance_name,
            source=entry.source,
            override=override or entry.override,
            origin="table",
        )
        made._make = lambda: made._table_class(entry)(entry.instance_name, **entry.params)
        return made

    @classmethod
    def of_instance(
        cls,
        op: DistributedOp,
        provider: str,
        source: str,
        *,
        name: str | None = None,
        override: bool | frozenset[str] = False,
        origin: Origin = "registered",
        version: str | None = None,
    ) -> OpEntry:
        """From an op object."""
        kind = type(op)
        return cls(
            name=op.op_name if name is None else name,
            provider=provider,
            version=version,
            class_path=f"{kind.__module__}:{kind.__qualname__}",
            params={},
            instance_name=op.op_name,
            source=source,
            override=override,
            origin=origin,
            instance=op,
        )

    @classmethod
    def of_factory(
        cls,
        name: str,
        factory: Callable[[], DistributedOp],
        provider: str,
        source: str,
        *,
        override: bool | frozenset[str] = False,
        version: str | None = None,
    ) -> OpEntry:
        """From a function that makes the op."""
        return cls(
            name=name,
            provider=provider,
            version=version,
            class_path=f"{factory.__module__}:{getattr(factory, '__qualname__', repr(factory))}",
            params={},
            instance_name=name,
            source=source,
            override=override,
            origin="registered",
            _make=factory,
        )

    def _table_class(self, entry: TableEntry) -> type[DistributedOp]:
        from hyper_parallel._rules.op import DistributedOp

        place = entry.module or str(entry.file)
        try:
            module = importlib.import_module(entry.module) if entry.module else _import_file(entry.file)
        except NOT_OURS:
            raise
        except BaseException as error:
            raise self._fault(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
        found = getattr(module, entry.class_name, None)
        if found is None:
            classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
            near = difflib.get_close_matches(entry.class_name, classes, n=1)
            raise self._fault(
                f"{place} has no class {entry.class_name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if not (inspect.isclass(found) and issubclass(found, DistributedOp)):
            raise self._fault(f"{self.class_path} is no subclass of DistributedOp")
        return found


def _described(op: DistributedOp) -> tuple[type, str]:
    """An op's class and public attributes; what it keeps under private names may depend on its past."""
    return type(op), repr(sorted((name, value) for name, value in vars(op).items() if not name.startswith("_")))


def _import_file(path: Path | None) -> ModuleType:
    """Import a Python file that belongs to no package; once, however many ops it implements."""
    assert path is not None
    path = path.resolve()
    name = f"hyper_parallel_op_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no Python file {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
