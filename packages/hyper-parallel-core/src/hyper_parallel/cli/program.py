"""Parses the command line and runs one command, core's own or a plugin's."""

from __future__ import annotations

import argparse
import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

from hyper_parallel.cli import (
    coverage_command,
    doctor_command,
    explain_command,
    new_plugin_command,
    ops_command,
    plugins_command,
)
from hyper_parallel.cli.reporting import tolerant_manager
from hyper_parallel.errors import PluginError
from hyper_parallel.plugins import Command, PluginManager, use_manager

CORE_COMMANDS = tuple(
    module.COMMAND
    for module in (plugins_command, ops_command, coverage_command, explain_command, doctor_command, new_plugin_command)
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: arguments without the program's name; None means the process's.

    Returns:
        The exit code: 0 for success, 1 when what was asked for is not there or not in order, 2 for wrong usage.
    """
    argv = sys.argv[1:] if argv is None else argv
    # Broken plugins are part of what the program shows; warnings on top would only repeat it.
    with use_manager(tolerant_manager()) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        # What torch says when it is imported where there is no numpy, which nothing here needs.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        try:
            commands = _commands(manager)
            unknown = _unknown_command(argv, commands)
            if unknown:
                print(f"hyper-parallel: {unknown}", file=sys.stderr)
                return 2
            arguments = _parser(commands).parse_args(argv)
            return int(arguments.run(arguments))
        except PluginError as error:
            print(f"hyper-parallel: {error}", file=sys.stderr)
            return 1
        except BrokenPipeError:  # the reader of a pipe, such as head, had enough
            sys.stderr.close()
            return 0


def _commands(manager: PluginManager) -> list[Command]:
    commands = {command.name: command for command in CORE_COMMANDS}
    try:
        implementations = manager.implementations("hyper_parallel_cli_commands")
    except PluginError:  # settings that make no sense: the command that needs a plugin meets this error again
        implementations = []
    for record, call in implementations:
        with manager.isolated(record):
            commands |= _usable(call(), commands, record.name)
    return list(commands.values())


def _usable(given: Iterable[Command], taken: Mapping[str, Command], plugin: str) -> dict[str, Command]:
    """A plugin's commands by name, all of them or an error."""
    usable: dict[str, Command] = {}
    for command in given:
        if command.name in taken or command.name in usable:
            raise PluginError(f"its command {command.name!r} is taken already", plugin=plugin)
        command.add_arguments(argparse.ArgumentParser())  # what fails here would otherwise end every command
        usable[command.name] = command
    return usable


def _unknown_command(argv: Sequence[str], commands: Sequence[Command]) -> str:
    """What is wrong with the name of a command, and the names that are like it; empty when nothing is."""
    names = [command.name for command in commands]
    if not argv or argv[0].startswith("-") or argv[0] in names:
        return ""
    near = difflib.get_close_matches(argv[0], names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(names)}"
    return f"there is no command {argv[0]!r}; {hint}"


def _parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hyper-parallel", description="Distributed tensors and operators for PyTorch, extended by plugins."
    )
    parser.add_argument("--version", action="version", version=f"hyper-parallel-core {version('hyper-parallel-core')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser
