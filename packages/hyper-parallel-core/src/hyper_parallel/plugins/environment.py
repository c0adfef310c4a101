"""The environment variables that steer plugins, read once by the manager.

``HYPER_PARALLEL_DISABLE_PLUGINS=a,b``
    leaves plugins out by name; ``*`` leaves all out.
``HYPER_PARALLEL_PLUGINS=a,b``
    uses only these; set but empty uses none.
``HYPER_PARALLEL_STRICT_PLUGINS=1``
    makes a plugin that cannot be used an error instead of a warning (for CI and clusters).
``HYPER_PARALLEL_PREFER=op=plugin,...``
    says whose implementation of an op counts when several plugins have one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hyper_parallel.errors import PluginError

DISABLE = "HYPER_PARALLEL_DISABLE_PLUGINS"
ALLOW = "HYPER_PARALLEL_PLUGINS"
STRICT = "HYPER_PARALLEL_STRICT_PLUGINS"
PREFER = "HYPER_PARALLEL_PREFER"


@dataclass(frozen=True)
class PluginSettings:
    """What the environment says about plugins.

    Attributes:
        disabled: names to leave out.
        allowed: the only names to use, None for no such limit.
        strict: whether a plugin that cannot be used is an error.
        preferred: op name to plugin name.
    """

    disabled: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    strict: bool = False
    preferred: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> PluginSettings:
        """Read the variables named at the top of this module from ``environ`` (default: the process's)."""
        environ = os.environ if environ is None else environ
        return cls(
            disabled=frozenset(_names(environ.get(DISABLE, ""))),
            allowed=frozenset(_names(environ[ALLOW])) if ALLOW in environ else None,
            strict=_flag(environ.get(STRICT, "")),
            preferred=_pins(environ.get(PREFER, "")),
        )

    def why_blocked(self, name: str) -> tuple[str, str]:
        """The reason for which a plugin of this name is left out and what to do to use it; empty when it is not."""
        if name in self.disabled:
            return f"disabled by {DISABLE}", f"remove {name!r} from {DISABLE}"
        if "*" in self.disabled:
            return f"disabled by {DISABLE}", f"unset {DISABLE}, whose '*' leaves all plugins out"
        if self.allowed is not None and name not in self.allowed:
            return f"not listed in {ALLOW}", f"add {name!r} to {ALLOW}, or unset it"
        return "", ""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise PluginError(f"{STRICT}={text!r} is neither on nor off; use 1 or 0")


def _pins(text: str) -> dict[str, str]:
    pins = {}
    for pin in _names(text):
        op, equals, plugin = (part.strip() for part in pin.partition("="))
        if not (op and equals and plugin):
            raise PluginError(f"{PREFER} holds {pin!r}; write it as op=plugin, for example {PREFER}=add=ops-basic")
        pins[op] = plugin
    return pins
