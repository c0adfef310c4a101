"""Every error class of the library; each carries the objects at fault as attributes, not only in its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class MissingPluginError(ImportError):
    """A public name was asked for whose plugin is not installed, or is installed but was left out.

    An ImportError and not an AttributeError, because ``from hyper_parallel import x`` throws an AttributeError's
    text away, and the text holds the command that repairs the situation.

    Attributes:
        public_name: the name asked for, such as ``"fully_shard"``.
        dist: the pip package that provides it, such as ``"hyper-parallel-fsdp"``.
    """

    def __init__(self, message: str, *, public_name: str, dist: str) -> None:
        super().__init__(message, name="hyper_parallel")
        self.public_name = public_name
        self.dist = dist


class PluginError(RuntimeError):
    """A plugin, or something that a plugin provides, cannot be used.

    Attributes:
        plugin: name of the plugin at fault, or None when the fault is not one plugin's.
    """

    def __init__(self, message: str, *, plugin: str | None = None) -> None:
        super().__init__(message)
        self.plugin = plugin


class OpTableError(PluginError, ValueError):
    """A YAML op table is malformed. The text lists every problem found, each as ``file:line:column``.

    Attributes:
        problems: the single messages, in the order of the file.
    """

    def __init__(self, message: str, *, problems: Sequence[str], plugin: str | None = None) -> None:
        super().__init__(message, plugin=plugin)
        self.problems = tuple(problems)


class OpConflictError(PluginError):
    """Several providers implement one op differently and nothing says which of them is meant.

    Attributes:
        op_name: the op.
        entries: the :class:`hyper_parallel.registry.op_entry.OpEntry` objects that compete.
    """

    def __init__(self, message: str, *, op_name: str, entries: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.op_name = op_name
        self.entries = tuple(entries)


class MissingOpError(NotImplementedError):
    """No distributed rule is registered for a function or an op name.

    Attributes:
        func: the callable that has no rule, or None when a name was asked for.
        op_name: its readable name.
    """

    def __init__(self, message: str, *, func: Callable[..., Any] | None = None, op_name: str | None = None) -> None:
        super().__init__(message)
        self.func = func
        self.op_name = op_name


class RedistributionError(ValueError):
    """The inputs' layouts fit no strategy of an op, and the policy does not allow to redistribute them.

    Attributes:
        op_name: the op.
        layouts: the layouts of the arguments, None for arguments that are no DTensors.
        strategies: readable forms of the strategies that would have fitted.
    """

    def __init__(
        self,
        message: str,
        *,
        op_name: str | None = None,
        layouts: Sequence[Any] = (),
        strategies: Sequence[Any] = (),
    ) -> None:
        super().__init__(message)
        self.op_name = op_name
        self.layouts = tuple(layouts)
        self.strategies = tuple(strategies)


class ResultCheckError(RuntimeError):
    """``check_results()`` found a DTensor that is not what it states.

    Attributes:
        op_name: the operator after which, or for which, it was found.
        layouts: of the tensor at fault; for a remembered form, those of both.
    """

    def __init__(self, message: str, *, op_name: str, layouts: Sequence[Any]) -> None:
        super().__init__(message)
        self.op_name = op_name
        self.layouts = tuple(layouts)


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; raised on every rank, with the same text.

    Attributes:
        failures: what was raised, by rank.
    """

    def __init__(self, message: str, *, failures: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})
