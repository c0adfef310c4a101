"""The registry: which :class:`DistributedOp` handles a torch function, who provides it, and where it was defined.

It is filled on first use from the installed plugins and from the folder of tables that ``HYPER_PARALLEL_OPS_YAML_DIR``
names; an op's class is imported when the op is first used. Nothing here depends on the order in which plugins are
loaded: where two of them implement one op differently and nothing says which is meant, using that op is an error.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import MissingOpError, PluginError
from hyper_parallel.plugins.manager import PluginManager, default_manager
from hyper_parallel.plugins.op_table import OpTable
from hyper_parallel.plugins.record import PluginRecord
from hyper_parallel.registry.autograd_functions import serve_apply
from hyper_parallel.registry.function_index import FunctionIndex
from hyper_parallel.registry.messages import by_provider, conflict_error, listing, missing_text, taken_error
from hyper_parallel.registry.module_functions import serve_module_function
from hyper_parallel.registry.op_entry import USER, OpEntry
from hyper_parallel.utils import function_names
from hyper_parallel.utils.function_names import Function

if TYPE_CHECKING:
    from hyper_parallel._rules.op import DistributedOp

TABLES_FOLDER = "HYPER_PARALLEL_OPS_YAML_DIR"

# Called when a registry changes or another one becomes the default: whoever remembers answers forgets them.
LISTENERS: list[Callable[[], None]] = []


class Registry:
    """Ops by name and by function.

    Args:
        plugins: whose ops it holds; None means those of :func:`hyper_parallel.plugins.default_manager`.
        environ: where ``HYPER_PARALLEL_OPS_YAML_DIR`` is read from; None means the process's environment.

    Attributes:
        generation: grows with every registration; whoever keeps answers of this registry drops them when it changed.
    """

    def __init__(self, plugins: PluginManager | None = None, environ: Mapping[str, str] | None = None) -> None:
        self.generation = 0
        self._plugins = plugins
        self._environ = environ
        self._entries: dict[str, list[OpEntry]] = {}
        self._pins: dict[str, str] = {}
        self._functions: FunctionIndex | None = None
        self._filled = False
        self._filling = False
        self._filling_for: PluginRecord | None = None
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ questions

    def find(self, func: Function) -> DistributedOp | None:
        """The op that handles a function as it arrives in ``__torch_function__``, or None.

        Raises:
            OpConflictError: several providers implement it and nothing says which is meant.
            PluginError: its class cannot be imported or made.
        """
        entry = self.find_entry(func)
        return entry.op if entry is not None else None

    def find_entry(self, func: Function) -> OpEntry | None:
        """As :meth:`find`, but the registry's entry: who provides the op, and where."""
        with self._lock:
            names = self._names_of(func)
            if names:
                return self._choose(names, func)
            binding = function_names.aten_binding(func)
            return self.find_entry(binding) if binding is not None else None

    def entries_of(self, func: Function) -> list[OpEntry]:
        """The entries of every op name that means a function, rivals of a conflict included."""
        with self._lock:
            return [entry for name in sorted(self._names_of(func)) for entry in self.entries(name)]

    def _names_of(self, func: Function) -> Mapping[str, int]:
        self._fill()
        if self._functions is None:
            self._functions = FunctionIndex(self._entries)
        return self._functions.names_of(func)

    def get(self, name: str) -> DistributedOp | None:
        """The op of this name, or None. ``add_`` is found as ``add`` when it has no entry of its own."""
        with self._lock:
            self._fill()
            entry = self._entry_named(name)
            return entry.op if entry is not None else None

    def entries(self, name: str | None = None) -> list[OpEntry]:
        """All entries, or those of one op name, sorted by name and provider; rivals of a conflict included."""
        with self._lock:
            self._fill()
            names = sorted(self._entries) if name is None else [name]
            return [entry for n in names for entry in sorted(self._entries.get(n, ()), key=by_provider)]

    def chosen(self, name: str) -> OpEntry | None:
        """The entry that counts for exactly this op name, or None.

        Raises:
            OpConflictError: nothing says which of several counts.
        """
        with self._lock:
            self._fill()
            return self._choose_among(name, self._entries[name]) if name in self._entries else None

    def missing_message(self, func: Function) -> str:
        """What to tell a user whose function has no rule: its name, and how to get a rule for it."""
        with self._lock:
            self._fill()
            return self._missing_text(function_names.display_name(func))

    def missing_error(self, name: str) -> MissingOpError:
        """The error for an op name that nobody has registered."""
        return MissingOpError(self._missing_text(name), op_name=name)

    def _missing_text(self, shown: str) -> str:
        return missing_text(shown, self._entries, (self._plugins or default_manager()).records())

    def fingerprint_lines(self) -> list[str]:
        """One line per entry with all that ranks must agree on; comparing two ranks' lines shows what differs."""
        pins = [f"pin {name}={provider}" for name, provider in sorted(self._all_pins().items())]
        return sorted(entry.fingerprint_line for entry in self.entries()) + pins

    def fingerprint(self) -> str:
        """A digest of :meth:`fingerprint_lines`: equal on two ranks exactly when they dispatch alike."""
        return hashlib.sha256("\n".join(self.fingerprint_lines()).encode()).hexdigest()

    # ------------------------------------------------------------------ registration

    def register(self, name: str, op: DistributedOp, *, override: bool = False) -> None:
        """Register a user's op.

        Args:
            name: bare or dotted function name (:mod:`hyper_parallel.utils.function_names`), or any name for
                :meth:`get` and ``DFunction``.
            op: the op.
            override: take the name although somebody else has it; the op then counts instead of every plugin's.

        Raises:
            OpConflictError: the name is taken and ``override`` is False.
        """
        from hyper_parallel._rules.op import DistributedOp

        if not isinstance(op, DistributedOp):
            raise TypeError(f"register_distributed_op takes a DistributedOp instance, not {op!r}")
        with self._lock:
            self._fill()
            taken = [entry for entry in self._entries.get(name, ()) if entry.instance is not op]
            if taken and not override:
                raise taken_error(name, taken)
            self.add_entry(OpEntry.of_instance(op, USER, _caller(), name=name, override=override))

    def register_instance(self, op: DistributedOp) -> None:
        """Register an op that has just been constructed, under its own name.

        It competes with others of that name like a plugin's op does: constructing never replaces. Constructing the
        same class under the same name again, as a notebook does, replaces the older instance.
        """
        with self._lock:
            self._fill()
            provider = USER if self._filling_for is None else self._filling_for.name
            self.add_entry(OpEntry.of_instance(op, provider, _caller(op), origin="constructed"))

    def load_table(self, path: str | Path) -> None:
        """Register the ops of a user's YAML table (:mod:`.plugins.op_table`); they count instead of plugins'.

        Raises:
            OpTableError: the table is malformed.
        """
        entries = [OpEntry.of_table(entry, USER, override=True) for entry in OpTable.from_path(path).entries()]
        with self._lock:
            self._fill()
            for entry in entries:
                self.add_entry(entry)

    def prefer(self, name: str, provider: str) -> None:
        """Say whose implementation of op ``name`` counts (as ``HYPER_PARALLEL_PREFER`` does)."""
        with self._lock:
            self._fill()
            self._pins[name] = provider
            self._changed()

    def add_entry(self, entry: OpEntry) -> None:
        rivals = self._entries.setdefault(entry.name, [])
        rivals[:] = [rival for rival in rivals if not entry.supersedes(rival)]
        rivals.append(entry)
        if entry.name.endswith(".apply"):
            serve_apply(entry.name)
        elif function_names.is_module_function(entry.name):
            serve_module_function(entry.name)
        self._functions = None
        self._changed()

    def _changed(self) -> None:
        self.generation += 1
        _tell_listeners()

    # ------------------------------------------------------------------ filling

    def _fill(self) -> None:
        if self._filled or self._filling:
            return
        self._filling = True  # a plugin's hook may construct ops, which comes here again
        try:
            self._entries.clear()  # what an attempt that failed has left
            users = self._user_tables()
            self._add_plugins(self._plugins or default_manager())
            for entry in users:
                self.add_entry(entry)
            self._filled = True
        finally:
            self._filling = False

    def _add_plugins(self, manager: PluginManager) -> None:
        tables = {record.name: call for record, call in manager.implementations("hyper_parallel_op_tables")}
        hooks = {record.name: call for record, call in manager.implementations("hyper_parallel_register_ops")}
        for record in manager.active():
            with manager.isolated(record), self._all_or_nothing(record):
                for table in tables[record.name]() if record.name in tables else ():
                    for entry in table.entries():
                        self.add_entry(OpEntry.of_table(entry, record.name, version=record.version))
                if record.name in hooks:
                    hooks[record.name](registry=_PluginRegistrar(self, record))

    def _user_tables(self) -> list[OpEntry]:
        folder = (os.environ if self._environ is None else self._environ).get(TABLES_FOLDER, "")
        if not folder:
            return []
        if not Path(folder).is_dir():
            raise PluginError(f"{TABLES_FOLDER}={folder} is not a folder")
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".yaml", ".yml"))
        return [
            OpEntry.of_table(entry, USER, override=True)
            for path in paths
            for entry in OpTable.from_path(path).entries()
        ]

    @contextmanager
    def _all_or_nothing(self, record: PluginRecord) -> Iterator[None]:
        """A plugin that fails half-way leaves no ops behind."""
        self._filling_for = record
        try:
            yield
        except BaseException:
            for rivals in self._entries.values():
                rivals[:] = [entry for entry in rivals if entry.provider != record.name]
            self._entries = {name: rivals for name, rivals in self._entries.items() if rivals}
            raise
        finally:
            self._filling_for = None

    # ------------------------------------------------------------------ choosing

    def _choose(self, names: Mapping[str, int], func: Function) -> OpEntry:
        """The entry for a function that several op names can mean: a user's first, then the most direct name's."""

        def rank(name: str) -> tuple[bool, int]:
            of_user = any(entry.provider == USER for entry in self._entries[name]) and name not in self._all_pins()
            return of_user, names[name]

        best = max(map(rank, names))
        entries = [self._choose_among(name, self._entries[name]) for name in names if rank(name) == best]
        if not _all_the_same(entries):
            raise conflict_error(function_names.display_name(func), entries)
        return min(entries, key=by_provider)

    def _choose_among(self, name: str, entries: Sequence[OpEntry]) -> OpEntry:
        """The entry that counts among those of one op name."""
        pin = self._all_pins().get(name)
        if pin is not None:
            pinned = [entry for entry in entries if entry.provider == pin]
            if not pinned:
                raise PluginError(
                    f"op {name!r} is pinned to {pin!r}, which does not provide it; providers:\n{listing(entries)}"
                )
            entries = pinned
        standing = [entry for entry in entries if not any(other.overrides(entry) for other in entries)]
        if not standing or not _all_the_same(standing):
            raise conflict_error(name, standing or entries)
        return min(standing, key=by_provider)

    def _entry_named(self, name: str) -> OpEntry | None:
        for candidate in (name, *function_names.base_names(name)):
            if candidate in self._entries:
                return self._choose_among(candidate, self._entries[candidate])
        named = [entry for rivals in self._entries.values() for entry in rivals if entry.instance_name == name]
        return self._choose_among(name, named) if named else None

    def _all_pins(self) -> dict[str, str]:
        return {**(self._plugins or default_manager()).settings.preferred, **self._pins}


class _PluginRegistrar:
    """Implements :class:`hyper_parallel.plugins.OpRegistrar` for one plugin."""

    def __init__(self, registry: Registry, record: PluginRecord) -> None:
        self._registry = registry
        self._record = record

    def register(
        self, name: str, op: DistributedOp | Callable[[], DistributedOp], *, override: bool | Sequence[str] = ()
    ) -> None:
        from hyper_parallel._rules.op import DistributedOp

        about: dict[str, Any] = {
            "override": override if isinstance(override, bool) else frozenset(override),
            "version": self._record.version,
        }
        provider, source = self._record.name, _caller()
        if isinstance(op, DistributedOp):
            entry = OpEntry.of_instance(op, provider, source, name=name, **about)
        elif callable(op):
            entry = OpEntry.of_factory(name, op, provider, source, **about)
        else:
            raise TypeError(f"register takes a DistributedOp or a function that makes one, not {op!r}")
        self._registry.add_entry(entry)


def _all_the_same(entries: Sequence[OpEntry]) -> bool:
    return all(entry.does_the_same_as(entries[0]) for entry in entries[1:])


def _caller(constructed: DistributedOp | None = None) -> str:
    """``file:line`` of the code outside this package that registers something, or has an op constructed."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        ours = frame.f_globals.get("__name__", "").split(".")[0] == "hyper_parallel"
        its_own = constructed is not None and frame.f_locals.get("self") is constructed
        if not (ours or its_own):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_default: Registry | None = None


def default_registry() -> Registry:
    """The registry that the program uses."""
    global _default
    if _default is None:
        _default = Registry()
    return _default


@contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """Make ``registry`` the default one inside the ``with`` block (for tests)."""
    global _default
    previous, _default = _default, registry
    _tell_listeners()
    try:
        yield registry
    finally:
        _default = previous
        _tell_listeners()


def _tell_listeners() -> None:
    for forget in LISTENERS:
        forget()


def register_distributed_op(name: str, op: DistributedOp, override: bool = False) -> None:
    """Register an op for a torch function, or under a name of your own; see :meth:`Registry.register`."""
    default_registry().register(name, op, override=override)


def get_distributed_op(name: str) -> DistributedOp:
    """The op registered under a name.

    Raises:
        MissingOpError: there is none.
    """
    registry = default_registry()
    op = registry.get(name)
    if op is None:
        raise registry.missing_error(name)
    return op


def load_op_table(path: str | Path) -> None:
    """Register the ops of a YAML table of your own; see :mod:`hyper_parallel.plugins.op_table` for the format."""
    default_registry().load_table(path)


def prefer(name: str, provider: str) -> None:
    """Say which plugin's implementation of an op counts; see :meth:`Registry.prefer`."""
    default_registry().prefer(name, provider)
