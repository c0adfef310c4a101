"""What a plugin author and a curious user need of the plugin layer. Imports no torch and searches no plugins.

Write a plugin: :mod:`hyper_parallel.plugins.hookspecs`. See what is installed: ``hyper-parallel plugins``.
"""

from hyper_parallel.plugins.commands import Command
from hyper_parallel.plugins.manager import PluginManager, default_manager, use_manager
from hyper_parallel.plugins.markers import API_VERSION, ENTRY_POINT_GROUP, hookimpl
from hyper_parallel.plugins.op_table import OpTable
from hyper_parallel.plugins.platforms import Platform
from hyper_parallel.plugins.record import PluginRecord
from hyper_parallel.plugins.registrar import OpRegistrar

__all__ = [
    "API_VERSION",
    "Command",
    "ENTRY_POINT_GROUP",
    "OpRegistrar",
    "OpTable",
    "Platform",
    "PluginManager",
    "PluginRecord",
    "available",
    "default_manager",
    "hookimpl",
    "use_manager",
]


def available(name: str) -> bool:
    """Whether ``from hyper_parallel import NAME`` finds a provider. (``hasattr`` raises where a plugin is missing.)"""
    from hyper_parallel._public_names import CORE_MODULE_OF

    return name in CORE_MODULE_OF or name in default_manager().public_names()
