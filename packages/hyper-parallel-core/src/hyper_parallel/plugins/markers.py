"""The two pluggy markers and the version of the contract between core and plugins."""

from __future__ import annotations

import pluggy

PROJECT = "hyper_parallel"

#: Entry-point group of plugins. The name of an entry is the plugin's name, its value a module that imports no torch.
ENTRY_POINT_GROUP = "hyper_parallel.plugins"

#: Version of the plugin contract. A plugin module states the one it was written for as ``HYPER_PARALLEL_API = 1``.
#: A hook may gain arguments without a new version, because an implementation may accept fewer than the hook offers.
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)

#: Marks a function of a plugin module as the implementation of the hook of the same name.
hookimpl = pluggy.HookimplMarker(PROJECT)
