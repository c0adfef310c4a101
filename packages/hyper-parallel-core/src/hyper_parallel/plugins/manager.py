"""Finds the installed plugins and keeps them apart from each other and from the program.

pluggy's own loading stops at the first plugin that fails and does not say which package it came from, so the loop here
is ours. A plugin that cannot be used is left out with one warning that names it; the others work.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from hyper_parallel._public_names import CORE_MODULE_OF
from hyper_parallel.errors import MissingPluginError, PluginError
from hyper_parallel.plugins import environment, hookspecs
from hyper_parallel.plugins.environment import PluginSettings
from hyper_parallel.plugins.markers import API_VERSION, ENTRY_POINT_GROUP, PROJECT
from hyper_parallel.plugins.platforms import CORE_PLATFORMS, Platform
from hyper_parallel.plugins.record import NOT_OURS, PluginRecord, PublicName, Status, how_to_get

_PREFIX = "hyper_parallel_"


class PluginManager:
    """The plugins of one program. Nothing is searched or imported before the first question.

    Args:
        entry_points: the plugins to consider; None means the installed ones.
        environ: where the settings are read from (see :mod:`hyper_parallel.plugins.environment`); None means the
            process's environment, at the time of the first question.
    """

    def __init__(
        self, entry_points: Iterable[EntryPoint] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._entry_points = entry_points
        self._environ = environ
        self._records: dict[str, PluginRecord] = {}
        self._public_names: dict[str, PublicName] | None = None
        self._loaded = False
        self._lock = threading.RLock()
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._hooks = sorted(name for name in vars(hookspecs) if name.startswith(_PREFIX))

    # ------------------------------------------------------------------ questions

    @property
    def settings(self) -> PluginSettings:
        """What the environment says about plugins."""
        self.load()
        return self._settings

    def records(self) -> list[PluginRecord]:
        """Every plugin found, in use or not, by name."""
        self.load()
        return [self._records[name] for name in sorted(self._records)]

    def active(self) -> list[PluginRecord]:
        """The plugins in use, by name."""
        return [record for record in self.records() if record.status == "ok"]

    def implementations(self, hook: str) -> list[tuple[PluginRecord, Callable[..., Any]]]:
        """The plugins that implement ``hook``, each with a function that calls it with keyword arguments.

        In the order in which the plugins are asked: by name, the same on every rank; those that a plugin marks with
        ``tryfirst`` come before all others, with ``trylast`` after them.
        """
        self.load()
        found = getattr(self._pluggy.hook, hook).get_hookimpls()
        ordered = sorted(found, key=lambda it: (not it.tryfirst, it.trylast, it.plugin_name))
        return [(self._records[it.plugin_name], _bind(it)) for it in ordered]

    def collect(self, hook: str, **arguments: Any) -> list[tuple[PluginRecord, Any]]:
        """Call ``hook`` in every plugin; a plugin that raises is left out."""
        answers = []
        for record, call in self.implementations(hook):
            with self.isolated(record):
                answers.append((record, call(**arguments)))
        return answers

    def first_result(self, hook: str, **arguments: Any) -> Any:
        """The first answer to ``hook`` that is not None, or None.

        Raises:
            PluginError: a plugin raised. It is not skipped: the answer would silently be another plugin's.
        """
        for record, call in self.implementations(hook):
            try:
                answer = call(**arguments)
            except NOT_OURS:
                raise
            except BaseException as error:
                raise PluginError(
                    f"{hook} of plugin {record.origin} raised {type(error).__name__}: {error}", plugin=record.name
                ) from error
            if answer is not None:
                return answer
        return None

    def public_names(self) -> dict[str, PublicName]:
        """The names that plugins add to ``hyper_parallel``."""
        with self._lock:
            if self._public_names is None:
                targets: dict[str, dict[str, str]] = {}
                for record, call in self.implementations("hyper_parallel_public_names"):
                    with self.isolated(record):
                        for name, target in _checked_names(call()).items():
                            targets.setdefault(name, {})[record.name] = target
                self._public_names = {name: PublicName(name, targets[name]) for name in sorted(targets)}
            return self._public_names

    def model_plan(self, class_name: str) -> str | None:
        """Where the recipe for models of a class is, as ``"module:function"``; None when no plugin has one.

        Raises:
            PluginError: two plugins have one.
        """
        plans = self.collect("hyper_parallel_model_plans")
        given = {record.name: answer[class_name] for record, answer in plans if class_name in answer}
        if len(given) > 1:
            raise PluginError(f"plugins {sorted(given)} each give a plan for {class_name}; disable one of them")
        return next(iter(given.values()), None)

    def platform(self, device_type: str) -> Platform:
        """The platform of a device type: a plugin's if one gives it, else core's.

        Raises:
            PluginError: nobody knows the device type, or two plugins describe it differently.
        """
        known = {platform.device_type: platform for platform in CORE_PLATFORMS}
        given: dict[str, dict[str, Platform]] = {}
        for record, platforms in self.collect("hyper_parallel_platforms"):
            for platform in platforms:
                given.setdefault(platform.device_type, {})[record.name] = platform
        rivals = given.get(device_type, {})
        if len(set(rivals.values())) > 1:
            raise PluginError(f"device type {device_type!r} is described differently by plugins {sorted(rivals)}")
        if rivals:
            return next(iter(rivals.values()))
        if device_type not in known:
            raise PluginError(
                f"device type {device_type!r} is unknown; core and the installed plugins know "
                f"{sorted({*known, *given})}"
            )
        return known[device_type]

    def missing_name_error(self, name: str, dist: str) -> MissingPluginError:
        """The error for a public name whose package ``dist`` is known but does not provide it here."""
        text = f"hyper_parallel.{name} is provided by {dist}, which {how_to_get(dist, self.records())}"
        return MissingPluginError(text, public_name=name, dist=dist)

    # ------------------------------------------------------------------ loading

    def load(self) -> None:
        """Find and import the installed plugins, once."""
        with self._lock:
            if self._loaded:
                return
            self._settings = PluginSettings.from_environ(self._environ)
            self._loaded = True  # from here on a failing plugin may ask questions about the others
            found = entry_points(group=ENTRY_POINT_GROUP) if self._entry_points is None else self._entry_points
            by_name: dict[str, list[EntryPoint]] = {}
            for entry in found:
                by_name.setdefault(entry.name, []).append(entry)
            try:
                for name in sorted(by_name):
                    self._load_one(by_name[name])
                self._check_names_in_settings()
            except BaseException:
                self._forget_all()  # so that the next question meets the same error, not half of the plugins
                raise

    def register(self, module: Any, name: str) -> PluginRecord:
        """Use ``module`` as a plugin without installing it: for tests, and for programs with ops of their own.

        Do so before the first op is dispatched; the registry asks the plugins once.
        """
        self.load()
        with self._lock:
            if name in self._records:
                raise PluginError(f"a plugin named {name!r} exists already: {self._records[name].origin}", plugin=name)
            record = PluginRecord(name, None, None, getattr(module, "__name__", repr(module)))
            self._records[name] = record
            self._public_names = None
            try:
                with self.isolated(record):
                    self._admit(record, module)
            except PluginError:  # strict mode
                self._forget(name)
                raise
            return record

    @contextmanager
    def isolated(self, record: PluginRecord) -> Iterator[None]:
        """Run code of a plugin: an exception, ``sys.exit()`` too, leaves that plugin out (or, in strict mode, is
        raised)."""
        try:
            yield
        except NOT_OURS:
            raise
        except BaseException as error:
            self._leave_out(record, "broken", f"{type(error).__name__}: {error}", error)

    def _load_one(self, rivals: list[EntryPoint]) -> None:
        entry = rivals[0]
        dist = entry.dist
        record = PluginRecord(entry.name, dist.name if dist else None, dist.version if dist else None, entry.value)
        self._records[entry.name] = record
        reason, remedy = self._settings.why_blocked(entry.name)
        if reason:
            record.status, record.reason, record.remedy = "blocked", reason, remedy
            return
        if len(rivals) > 1:
            dists = sorted(rival.dist.name if rival.dist else rival.value for rival in rivals)
            self._leave_out(record, "broken", f"several packages call their plugin {entry.name!r}: {', '.join(dists)}")
            return
        with self.isolated(record):
            self._admit(record, importlib.import_module(entry.value.partition(":")[0].strip()))

    def _admit(self, record: PluginRecord, module: Any) -> None:
        """Check a plugin module and hand it to pluggy."""
        record.api = getattr(module, "HYPER_PARALLEL_API", None)
        if record.api != API_VERSION:
            built_for = "states no HYPER_PARALLEL_API" if record.api is None else f"built for plugin API {record.api}"
            self._leave_out(record, "incompatible", f"{built_for}, this core speaks {API_VERSION}")
            return
        for name, function in vars(module).items():
            options = getattr(function, f"{PROJECT}_impl", None)
            if options is None:
                if inspect.isfunction(function) and name.startswith(_PREFIX):
                    raise PluginError(f"{name} is not marked with @hookimpl", plugin=record.name)
                continue
            if options["wrapper"] or options["hookwrapper"]:
                raise PluginError(f"{name} is a hook wrapper; plugins are called one by one", plugin=record.name)
            name = options["specname"] or name
            if name not in self._hooks:
                near = difflib.get_close_matches(name, self._hooks, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; hooks are {', '.join(self._hooks)}"
                raise PluginError(f"unknown hook {name}{hint}", plugin=record.name)
        self._pluggy.register(module, name=record.name)  # checks the arguments of each hook
        record.module = module

    def _leave_out(self, record: PluginRecord, status: Status, reason: str, error: BaseException | None = None) -> None:
        text = f"hyper-parallel plugin {record.origin} left out: {status}: {reason}"
        if self._settings.strict:
            raise PluginError(text, plugin=record.name) from error
        record.status, record.reason = status, reason
        record.traceback = "".join(traceback.format_exception(error)) if error else ""
        record.module = None
        if self._pluggy.has_plugin(record.name):  # also when registration stopped half-way
            self._pluggy.unregister(name=record.name)
        self._public_names = None
        warnings.warn(
            f"{text}\n  full report: hyper-parallel plugins; silence: {environment.DISABLE}={record.name}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _forget_all(self) -> None:
        for name in list(self._records):
            self._forget(name)
        self._loaded = False

    def _forget(self, name: str) -> None:
        del self._records[name]
        if self._pluggy.has_plugin(name):
            self._pluggy.unregister(name=name)

    def _check_names_in_settings(self) -> None:
        """A misspelt name in an environment variable must not pass for a plugin that is blocked or allowed."""
        known = f"installed plugins: {', '.join(sorted(self._records)) or 'none'}"
        unknown = sorted((self._settings.allowed or frozenset()) - set(self._records))
        if unknown:
            raise PluginError(
                f"{environment.ALLOW} names plugins that are not installed: {', '.join(unknown)}; {known}"
            )
        unknown = sorted(self._settings.disabled - {"*"} - set(self._records))
        if unknown:
            # Only a warning: the same setting is used on machines that lack the plugin, where it does no harm.
            warnings.warn(
                f"{environment.DISABLE} names plugins that are not installed: {', '.join(unknown)}; {known}",
                RuntimeWarning,
                stacklevel=2,
            )


def _bind(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    """A function that calls one implementation with those of the hook's arguments that it accepts."""

    def call(**arguments: Any) -> Any:
        return implementation.function(*(arguments[name] for name in implementation.argnames))

    return call


def _checked_names(names: Any) -> dict[str, str]:
    """Validate an answer to ``hyper_parallel_public_names`` and complete its targets to ``module:attribute``."""
    complete = {}
    for name, target in dict(names).items():
        if not (isinstance(name, str) and name.isidentifier() and isinstance(target, str)):
            raise TypeError(f"hyper_parallel_public_names maps names to 'module:attribute'; got {name!r}: {target!r}")
        if name in CORE_MODULE_OF:
            raise ValueError(f"hyper_parallel_public_names gives {name!r}, which is a name of core")
        complete[name] = target if ":" in target else f"{target}:{name}"
    return complete


_default: PluginManager | None = None


def default_manager() -> PluginManager:
    """The manager that the program uses."""
    global _default
    if _default is None:
        _default = PluginManager()
    return _default


@contextmanager
def use_manager(manager: PluginManager) -> Iterator[PluginManager]:
    """Make ``manager`` the default one inside the ``with`` block (for tests)."""
    global _default
    previous, _default = _default, manager
    try:
        yield manager
    finally:
        _default = previous
